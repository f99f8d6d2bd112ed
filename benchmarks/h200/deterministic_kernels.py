"""Checks and times the batch-invariant kernels, for `benchmarks.h200.deterministic`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.h200.attention import SHAPES as ATTENTION_SHAPES
from benchmarks.h200.attention import decode_seqs, extend_seqs, make_step, planned
from benchmarks.h200.attention import runs as ordinary_runs
from benchmarks.h200.layer_ops import rope_arguments
from benchmarks.h200.linear import SHAPES, random, weights
from benchmarks.h200.sampling import make_rows
from benchmarks.h200.timing import graph_us, relative_error
from kernels.activation import ACTIVATION
from kernels.linear import triton_invariant as linears
from kernels.norm import NORM
from kernels.paged_attention import reference
from kernels.paged_attention import triton_invariant as ours
from kernels.rope import ROPE
from kernels.sampling import SAMPLING
from kernels.triton_support.device import shared_memory

DEVICE = torch.device("cuda")
TOKENS = (1, 2, 7, 16, 33, 64, 128, 300, 2048, 8192)
TIMED_TOKENS = (1, 16, 64, 256, 2048, 8192)
Found = tuple[list[str], list[str]]


def differ(got: Tensor, want: Tensor) -> int:
    """Return how many elements differ in their bits."""
    kind = {2: torch.int16, 4: torch.int32}[got.element_size()]
    return int((got.contiguous().view(kind) != want.contiguous().view(kind)).sum())


def linear() -> Found:
    """Compare the bits of all cuts and batch sizes, and time the product and cuBLAS."""
    wrong: list[str] = []
    cases = [(torch.bfloat16, shape) for shape in [*SHAPES["8B"][:4], *SHAPES["0.5B"][:4]]]
    cases += [(torch.bfloat16, (200, 1000)), (torch.float16, (4096, 4096))]
    cases += [(torch.float32, (1152, 896)), (torch.float32, (77, 1000))]
    for dtype, shape in cases:
        x, weight = random(TOKENS[-1], shape[1], dtype=dtype), random(*shape, dtype=dtype)
        bias = random(shape[0], dtype=dtype)
        name = f"linear {shape} {str(dtype)[6:]}"
        want = linears.run(x, weight, bias, linears.tiles(dtype)[0])
        exact = functional.linear(x[:64].double(), weight.double(), bias.double())
        error = relative_error(want[:64], exact)
        if not error < {torch.float32: 1e-5}.get(dtype, 1e-2):
            wrong.append(f"{name}: relative error {error:.1e}")
        wrong += [
            f"{name} {tile}: {count} of {want.numel()} elements"
            for tile in linears.tiles(dtype)
            if (count := differ(linears.run(x, weight, bias, tile), want))
        ]
        packed = linears.pack(weight, bias)
        for tokens in TOKENS:
            # The rows come from the middle of the batch, because a row's place in its block must
            # not change its bits either.
            first = 5 if tokens < TOKENS[-1] else 0
            rows = slice(first, first + tokens)
            if count := differ(packed(x[rows]), want[rows]):
                wrong.append(f"{name}, {tokens} tokens: {count} elements")
    lines = []
    for shape in [*SHAPES["8B"], *SHAPES["0.5B"]]:
        many = weights(shape)
        columns = []
        for tokens in TIMED_TOKENS:
            x = random(tokens, shape[1])
            used = many if tokens <= 256 else many[:2]
            if tokens * shape[0] > 2**28:
                continue
            took = graph_us([partial(linears.pack(w, None), x) for w in used], 7)
            cublas = graph_us([partial(functional.linear, x, w) for w in used], 7)
            columns.append(f"{tokens}: {took:.1f}/{cublas:.1f} = {took / cublas:.2f}")
        lines.append(f"linear {shape[1]} -> {shape[0]}, us ours/cuBLAS: " + ", ".join(columns))
        print(lines[-1], flush=True)
        del many
    return wrong, lines


def attend(
    layer: tuple[Tensor, Tensor, Tensor], table: Tensor, work: list[tuple[int, int]], window: int
) -> Tensor:
    """Compute some queries of one sequence, and return their outputs.

    `work` lists (first, count) of each run of queries; each run is a sequence of its own in the
    batch.
    """
    q, k, v = layer
    rows = torch.cat([torch.arange(first, first + count) for first, count in work]).to(DEVICE)
    lens = torch.tensor([sum(pair) for pair in work], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([0] + [count for _, count in work])
    return ours.paged_attention(
        q[rows],
        k,
        v,
        table.expand(len(work), -1).contiguous(),
        lens,
        counts.cumsum(0).to(DEVICE, torch.int32),
        q.shape[2] ** -0.5,
        window,
        None,
    )


def check_attention() -> Iterable[str]:
    length = 3000
    chunks = [(0, 1), (1, 6), (7, 57), (64, 192), (256, 1), (257, 1000), (1257, 1743)]
    decoded = [*range(0, length, 97), 255, 256, 511, 512, length - 1]
    cases = [
        *((shape, torch.bfloat16, window) for shape in ATTENTION_SHAPES for window in (-1, 0, 700)),
        ("8B", torch.float16, -1),
        ("0.5B", torch.float32, -1),
        ("0.5B", torch.float32, 700),
    ]
    for shape, dtype, window in cases:
        name = f"attention {shape} {str(dtype)[6:]} window {window}"
        step = make_step(ATTENTION_SHAPES[shape], [(length, length)], 1, dtype)
        q, k, v, _ = step.layers[0]
        run = partial(attend, (q, k, v), step.table, window=window)
        want = run([(0, length)])
        exact = reference.paged_attention(
            *(x.float() for x in (q, k, v)),
            *(step.table, step.lens, step.indptr, q.shape[2] ** -0.5, window, None),
        )
        error = relative_error(want, exact)
        if not error < {torch.float32: 1e-5}.get(dtype, 1e-2):
            yield f"{name}: relative error {error:.1e}"
        if count := differ(run(chunks), want):
            yield f"{name}: chunks differ in {count} elements"
        singles = [(position, 1) for position in decoded]
        if count := differ(run(singles), want[torch.tensor(decoded, device=DEVICE)]):
            yield f"{name}: decoded in a batch, {count} elements differ"
        for position in decoded[::7]:
            if count := differ(run([(position, 1)]), want[position : position + 1]):
                yield f"{name}: decoded alone at {position}, {count} elements differ"
        slots, ours._MAX_SLOTS = ours._MAX_SLOTS, 0
        if count := differ(run(singles), want[torch.tensor(decoded, device=DEVICE)]):
            yield f"{name}: decoded without splits, {count} elements differ"
        ours._MAX_SLOTS = slots


def attention() -> Found:
    """Check the bits, and time one layer with these kernels and with the ordinary ones."""
    wrong = list(check_attention())
    lines = []
    for name, shape in ATTENTION_SHAPES.items():
        for case, seqs, num_layers in [*decode_seqs(), *extend_seqs()]:
            step = make_step(shape, seqs, num_layers)
            tokens = len(step.layers[0][0])
            workspace = ours.InvariantWorkspace(len(step.lens), tokens, *shape, DEVICE)
            plan = ours.plan_attention(workspace, step.lens, step.indptr, tokens, 8192 * 4)
            normal = graph_us(ordinary_runs(shape, step, planned(shape, step)), 7)
            columns = []
            for tile in (None, *_tiles(shape[2])):
                calls: list[Callable[[], None]] = [
                    partial(
                        *(ours.run_attention, plan, q, k, v, step.table, shape[2] ** -0.5, out),
                        tile=tile,
                    )
                    for q, k, v, out in step.layers
                ]
                took = graph_us(calls, 7)
                label = "" if tile is None else f"{tile.num_warps}w{tile.num_stages}s "
                columns.append(f"{label}{took:.1f} ({took / normal:.2f})")
            lines.append(f"attention {name} {case}: usual {normal:.1f} us, {', '.join(columns)}")
            print(lines[-1], flush=True)
            del step, plan
    return wrong, lines


def _tiles(dim: int) -> list[ours.Tile]:
    usual = ours.tile_of(torch.bfloat16, dim, shared_memory(DEVICE).size)
    return [replace(usual, num_stages=stages) for stages in (3, 4)]


def rows() -> Found:
    """Compare each op's result for a row alone with its result in a batch."""
    wrong: list[str] = []
    norm, act_and_mul = NORM.load("triton"), ACTIVATION.load("triton").act_and_mul
    for width in (64, 896, 4096):
        x, residual, weight = random(300, width), random(300, width), random(width)
        stream = residual.clone()
        want = norm.fused_add_rms_norm(x, stream, weight, 1e-5)
        plain = norm.rms_norm(x, weight, 1e-5)
        gated = act_and_mul(torch.cat([x, residual], 1), "silu")
        for first, last in ((0, 1), (7, 9), (250, 300)):
            part = slice(first, last)
            mine = residual[part].clone()
            got = norm.fused_add_rms_norm(x[part].clone(), mine, weight, 1e-5)
            both = torch.cat([x[part], residual[part]], 1)
            for name, one, all_ in (
                ("norm", norm.rms_norm(x[part].clone(), weight, 1e-5), plain[part]),
                ("add norm", got, want[part]),
                ("residual", mine, stream[part]),
                ("silu", act_and_mul(both, "silu"), gated[part]),
            ):
                if count := differ(one, all_):
                    wrong.append(f"{name} {width} [{first}:{last}]: {count} elements")
    rope = ROPE.load("triton").rope_kv_write
    for normed in (False, True):
        arguments = list(rope_arguments("8B", 200, normed=normed))
        before, positions, slots = arguments[0].clone(), arguments[5], arguments[6]
        rope(*arguments)
        for first, last in ((0, 1), (3, 4), (90, 200)):
            part = slice(first, last)
            one = before[part].clone()
            alone = [one, *arguments[1:5], positions[part].clone(), slots[part].clone()]
            rope(*alone, *arguments[7:])
            if count := differ(one, arguments[0][part]):
                wrong.append(f"rope normed={normed} [{first}:{last}]: {count} elements")
    return wrong + list(_check_sampling()), []


def _check_sampling() -> Iterable[str]:
    ops = SAMPLING.load("triton")
    columns = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    for vocab, spread in ((151936, 1.0), (151936, 6.0), (5000, 2.0)):
        logits = torch.randn(64, vocab, device=DEVICE) * spread
        ranked = make_rows(64, 0.8, 50, 0.9, 0.0)
        plain = make_rows(64, 0.8, -1, 1.0, 0.0)
        # The same row without rank filters must draw the same token next to rows with filters and
        # next to rows without.
        mixed = replace(
            ranked,
            **{
                name: torch.cat([getattr(plain, name)[:32], getattr(ranked, name)[32:]])
                for name in columns
            },
        )
        if not torch.equal(ops.sample(logits, mixed)[:32], ops.sample(logits, plain)[:32]):
            yield f"sample x{vocab}: ranked neighbours change a draw"
        got = ops.sample(logits, mixed)
        for i in (0, 31, 32, 63):
            one = {name: getattr(mixed, name)[i : i + 1] for name in columns}
            if ops.sample(logits[i : i + 1], replace(mixed, **one)) != got[i]:
                yield f"sample x{vocab}: row {i} draws another token alone"
        ids = torch.randint(0, vocab, (64, 4), device=DEVICE)
        most = min(vocab, 4500)
        values, top, top_ids = ops.gather_logprobs(logits, ids, most)
        for top_k in (0, 3, 700):
            for part in (slice(0, 64), slice(9, 10)):
                mine, best, best_ids = ops.gather_logprobs(logits[part], ids[part, :2], top_k)
                if count := differ(mine, values[part, :2]) + differ(best, top[part, :top_k]):
                    yield f"logprobs x{vocab}: {count} differ with top {top_k} and top {most}"
                if not torch.equal(best_ids, top_ids[part, :top_k]):
                    yield f"logprobs x{vocab}: other ids with top {top_k} and top {most}"
