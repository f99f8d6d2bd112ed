"""Checks and times paged attention on an H200, and compares it with torch's attention.

The checks compare results with the reference. The timing covers decode, extend and prefill steps.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.h200.timing import graph_us, relative_error
from kernels.paged_attention import reference
from kernels.paged_attention import triton as ours

PAGE = 16
DEVICE = torch.device("cuda")
SHAPES = {"8B": (32, 8, 128), "0.5B": (14, 2, 64)}
# Microseconds of FlashInfer 0.6.14 on the same kind of GPU.
PEERS = {
    ("8B", "decode 64x1024"): 84,
    ("8B", "decode 256x768"): 213,
    ("8B", "decode 1x512"): 14,
    ("0.5B", "decode 64x1024"): 28,
    ("0.5B", "decode 256x768"): 45,
    ("8B", "prefill 1x4096"): 312,
}


@dataclass
class Step:
    """A step's tensors; `layers` holds (q, k, v, out) of several layers."""

    layers: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    table: Tensor
    lens: Tensor
    indptr: Tensor
    num_decodes: int


def make_step(shape, seqs, num_layers, dtype=torch.bfloat16, page_size=PAGE) -> Step:
    """Return a step with random tensors.

    `seqs` lists (KV length, number of queries) for each sequence, and decodes come first.
    """
    heads, kv_heads, dim = shape
    pages_each = [-(-kv_len // page_size) for kv_len, _ in seqs]
    num_pages = sum(pages_each) + 1
    order = torch.randperm(num_pages, dtype=torch.int32)
    table = torch.full((len(seqs), max(pages_each)), 2**30, dtype=torch.int32)
    start = 0
    for i, count in enumerate(pages_each):
        table[i, :count] = order[start : start + count]
        start += count
    lens = torch.tensor([kv_len for kv_len, _ in seqs], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([0] + [n for _, n in seqs])
    indptr = counts.cumsum(0).to(DEVICE, torch.int32)
    tokens = int(counts.sum())
    layers = []
    for _ in range(num_layers):
        q = torch.randn(tokens, heads + 2 * kv_heads, dim, device=DEVICE, dtype=dtype)[:, :heads]
        k, v = (
            torch.randn(num_pages, kv_heads, page_size, dim, device=DEVICE, dtype=dtype)
            for _ in "kv"
        )
        out = torch.full((tokens, heads * dim), float("nan"), device=DEVICE, dtype=dtype)
        layers.append((q, k, v, out))
    decodes = next((i for i, (_, n) in enumerate(seqs) if n != 1), len(seqs))
    return Step(layers, table.to(DEVICE), lens, indptr, decodes)


def planned(shape, step: Step):
    """Return the attention plan for the step."""
    tokens = len(step.layers[0][0])
    workspace = ours.AttentionWorkspace(len(step.lens), tokens, *shape, DEVICE)
    chunks = step.lens[step.num_decodes :]
    short = torch.equal(chunks, step.indptr.diff()[step.num_decodes :])
    return ours.plan_attention(
        workspace, step.lens, step.indptr, tokens, step.num_decodes, short_prompts=short
    )


def runs(shape, step: Step, plan, tiles=(None, None)):
    """Return one attention call per layer, to be timed."""
    scale = shape[2] ** -0.5
    return [
        lambda q=q, k=k, v=v, out=out: ours.run_attention(
            plan, q, k, v, step.table, scale, out, tiles=tiles
        )
        for q, k, v, out in step.layers
    ]


def check() -> list[str]:
    """Compare the outputs with the float32 reference; return a line for each error."""
    wrong = []
    mixes = {
        "decode": [(1024, 1)] * 5 + [(1, 1), (17, 1), (4000, 1)],
        "mixed": [(900, 1), (33, 1), (700, 700), (1500, 130), (64, 3)],
    }
    cases = itertools.product(SHAPES, mixes, [torch.bfloat16, torch.float16, torch.float32], [16])
    cases = [*cases, *itertools.product(SHAPES, mixes, [torch.bfloat16], [1, 32, 64])]
    for name, mix, dtype, page_size in cases:
        for window in (-1, 300):
            shape = SHAPES[name]
            step = make_step(shape, mixes[mix], 1, dtype, page_size)
            q, k, v, out = step.layers[0]
            scale = shape[2] ** -0.5
            tensors = (step.table, step.lens, step.indptr, scale, window)
            want = reference.paged_attention(q.float(), k.float(), v.float(), *tensors, None)
            limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
            ours.paged_attention(q, k, v, *tensors, out)
            errors = [relative_error(out, want)]
            workspace = ours.AttentionWorkspace(len(step.lens), len(q), *shape, DEVICE)
            plan = ours.plan_attention(
                workspace, step.lens, step.indptr, len(q), step.num_decodes, window
            )
            for _ in range(3):
                out.fill_(float("nan"))
                ours.run_attention(plan, q, k, v, step.table, scale, out)
                errors.append(relative_error(out, want))
            if not max(errors) < limit:
                wrong.append(f"attention {name} {mix} {dtype} page {page_size} {window}: {errors}")
    return wrong


def decode_seqs() -> Iterator[tuple[str, list[tuple[int, int]], int]]:
    """Yield each decode case: its name, its sequences, and its number of layers."""
    yield "decode 64x1024", [(1024, 1)] * 64, 4
    yield "decode 256x768", [(768, 1)] * 256, 2
    # Lengths at which the choices of `triton_tiles` change.
    for count, kv_len in ((8, 640), (16, 300), (32, 640), (48, 300), (64, 300), (64, 560)):
        yield f"decode {count}x{kv_len}", [(kv_len, 1)] * count, 8
    for count, kv_len in ((96, 300), (192, 640), (256, 660), (256, 750)):
        yield f"decode {count}x{kv_len}", [(kv_len, 1)] * count, 2
    for kv_len in (512, 1024, 2048, 4096):
        yield f"decode 1x{kv_len}", [(kv_len, 1)], 32
    yield "decode 8x1024", [(1024, 1)] * 8, 8
    ragged = [(64 + 37 * i % 1000, 1) for i in range(63)]
    yield "decode 63 ragged + 32768", [(32768, 1), *ragged], 4


def extend_seqs() -> Iterator[tuple[str, list[tuple[int, int]], int]]:
    yield "prefill 1x512", [(512, 512)], 8
    yield "prefill 16x512", [(512, 512)] * 16, 2
    yield "prefill 1x4096", [(4096, 4096)], 4
    yield "prefill 8x1024", [(1024, 1024)] * 8, 2
    yield "extend 64x64 on 4096", [(4160, 64)] * 64, 1
    yield "extend 4x512 on 2048", [(2560, 512)] * 4, 2
    yield "mixed 32 decode + 1x2048", [(1024, 1)] * 32 + [(2048, 2048)], 4


def key_bytes(shape, seqs) -> int:
    return sum(kv_len for kv_len, _ in seqs) * shape[1] * shape[2] * 2 * 2


def flops(shape, seqs) -> int:
    pairs = sum(n * (kv_len - n) + n * (n + 1) // 2 for kv_len, n in seqs)
    return pairs * shape[0] * shape[2] * 4


def measure() -> list[dict[str, object]]:
    """Time every case; return one row per case."""
    rows: list[dict[str, object]] = []
    for name, shape in SHAPES.items():
        for case, seqs, num_layers in [*decode_seqs(), *extend_seqs()]:
            step = make_step(shape, seqs, num_layers)
            plan = planned(shape, step)
            took = graph_us(runs(shape, step, plan))
            row = {"model": name, "case": case, "us": took, "peer_us": PEERS.get((name, case))}
            row["gb_per_s"] = key_bytes(shape, seqs) / took / 1e3
            row["tflop_per_s"] = flops(shape, seqs) / took / 1e6
            row.update(torch_attention(shape, seqs))
            rows.append(row)
            del step, plan
    for case, batch in (("plan 1", 1), ("plan 64", 64), ("plan 256", 256)):
        step = make_step(SHAPES["8B"], [(1024, 1)] * batch, 1)
        workspace = ours.AttentionWorkspace(batch, batch, *SHAPES["8B"], DEVICE)
        took = graph_us(
            [lambda s=step, w=workspace, b=batch: ours.plan_attention(w, s.lens, s.indptr, b, b)]
            * 8
        )
        rows.append({"model": "8B", "case": case, "us": took})
    return rows


def torch_attention(shape, seqs) -> dict[str, float]:
    """Time torch's attention on plain (not paged) keys where all sequences are alike."""
    heads, kv_heads, dim = shape
    kv_len, queries = seqs[0]
    if set(seqs) != {(kv_len, queries)} or (queries != 1 and queries != kv_len):
        return {}
    batch, took = len(seqs), {}
    layers = 8 if batch * kv_len < 20000 else 1
    tensors = [
        (
            torch.randn(batch, heads, queries, dim, device=DEVICE, dtype=torch.bfloat16),
            torch.randn(batch, kv_heads, kv_len, dim, device=DEVICE, dtype=torch.bfloat16),
            torch.randn(batch, kv_heads, kv_len, dim, device=DEVICE, dtype=torch.bfloat16),
        )
        for _ in range(layers)
    ]
    for label, backend in (
        ("torch_flash_us", SDPBackend.FLASH_ATTENTION),
        ("torch_cudnn_us", SDPBackend.CUDNN_ATTENTION),
    ):
        try:
            with sdpa_kernel([backend]):
                took[label] = graph_us(
                    [
                        lambda q=q, k=k, v=v: functional.scaled_dot_product_attention(
                            q, k, v, is_causal=queries > 1, enable_gqa=True
                        )
                        for q, k, v in tensors
                    ]
                )
        except RuntimeError as error:
            print(label, str(error).splitlines()[0])
    return took
