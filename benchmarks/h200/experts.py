"""Times mixtures of experts on an H200: our Triton kernels and torch's grouped products.

    python -m benchmarks.h200.experts [--shape A2.7B 30B-A3B 8x7B] [--tokens 1 8 64] [--tune]
        [--check] [--forms w4a16 mxfp4] [--json FILE]

A call chooses experts from random logits and computes them, as one layer does. The times are
microseconds from CUDA graphs, with weights that are not in the L2 cache. `--check` first compares
all implementations with the reference. `--tune` also times other tiles, and prints the fastest tile
for each number of tokens, to be put into `kernels.experts.triton.TILES`. `--forms` also times
experts with quantized weights; with `--tune` it times their tiles, for
`kernels.experts.triton_coded.TILES`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200.timing import graph_us, relative_error
from headrace.bench.environment import describe_environment, write_json
from kernels.experts import PackedExperts, pack_experts
from kernels.experts.triton import (
    INVARIANT,
    TILES,
    SortedExperts,
    Tile,
    TritonExperts,
    tile_of,
)
from kernels.experts.triton_coded import CodedExperts
from kernels.experts.triton_coded import pack as pack_codes
from kernels.group_linear import Form, encode

DEVICE = torch.device("cuda")
# Each entry: number of experts, experts chosen for each token, hidden size of the model, and width
# of an expert.
SHAPES = {
    "A2.7B": (60, 4, 2048, 1408),
    "30B-A3B": (128, 8, 2048, 768),
    "8x7B": (8, 2, 4096, 14336),
    "gpt-oss-20b": (32, 4, 2880, 2880),
}
# Quantized formats of experts: the form, and the number of columns in a group.
FORMS: dict[str, tuple[Form, int]] = {
    "w4a16": ("int4", 128),
    "w4a16-32": ("int4", 32),
    "w8a16": ("int8", 128),
    "mxfp4": ("mxfp4", 32),
}
CODED_OTHERS = tuple(
    Tile(*sizes, stages)
    for sizes, stages in itertools.product(
        (
            *((64, 16, 128, 4), (128, 16, 128, 4), (128, 16, 128, 8), (64, 32, 128, 4)),
            *((128, 32, 128, 8), (64, 64, 128, 4), (128, 64, 128, 4), (128, 64, 128, 8)),
            *((64, 128, 128, 4), (128, 128, 128, 8), (128, 256, 128, 8)),
        ),
        (2, 3, 4, 6),
    )
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192)
# Bytes of weights that are used in turn: more than the L2 cache holds, but a small part of the
# GPU's memory.
ROTATED_BYTES = 400_000_000
OTHER_TILES = tuple(
    Tile(*sizes, stages)
    for sizes, stages in itertools.product(
        (
            *((64, 16, 64, 4), (64, 16, 128, 4), (64, 16, 256, 4), (128, 16, 64, 4)),
            *((128, 16, 128, 4), (64, 32, 64, 4), (64, 32, 128, 4), (128, 32, 64, 4)),
            *((64, 64, 64, 4), (64, 64, 128, 4), (128, 64, 64, 4), (128, 64, 64, 8)),
            *((64, 128, 64, 4), (128, 128, 64, 8), (128, 256, 64, 8), (256, 128, 64, 8)),
        ),
        (2, 3, 4, 5),
    )
)


def weights(shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    experts, _, hidden, inner = shape
    gate_up = torch.randn(experts, 2 * inner, hidden, device=DEVICE, dtype=torch.bfloat16)
    down = torch.randn(experts, hidden, inner, device=DEVICE, dtype=torch.bfloat16)
    return gate_up.mul_(hidden**-0.5), down.mul_(inner**-0.5)


def layers(shape: tuple[int, int, int, int]) -> list[tuple[Tensor, Tensor]]:
    size = 3 * shape[0] * shape[2] * shape[3] * 2
    return [weights(shape) for _ in range(max(2, ROTATED_BYTES // size))]


def step(
    experts: PackedExperts, x: Tensor, logits: Tensor, chosen: int, tile: Tile | None = None
) -> Tensor:
    ids, factors = experts.choose(logits, chosen, sums_to_one=False)
    if tile is None:
        return experts(x, ids, factors, "silu")
    assert isinstance(experts, SortedExperts)
    return experts.run(x, ids, factors, "silu", tile)


def inputs(shape: tuple[int, int, int, int], tokens: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(tokens, shape[2], device=DEVICE, dtype=torch.bfloat16)
    return x, torch.randn(tokens, shape[0], device=DEVICE, dtype=torch.bfloat16)


def check(shape: tuple[int, int, int, int]) -> list[str]:
    """Compare all implementations with the reference; return the errors.

    The batch-invariant implementation must also give a row the same bits alone and in a batch.
    """
    wrong = []
    gate_up, down = weights(shape)
    reference = pack_experts(gate_up, down, "reference", "reference")
    triton, invariant, grouped = (
        pack_experts(gate_up, down, implementation=name)
        for name in ("triton", "triton_invariant", "grouped")
    )
    for tokens in (1, 7, 33, 200, 2000):
        x, logits = inputs(shape, tokens)
        ids, factors = reference.choose(logits.float(), shape[1], sums_to_one=False)
        want = reference(x, ids, factors, "silu")
        for name, way in (("triton", triton), ("invariant", invariant), ("grouped", grouped)):
            error = relative_error(way(x, ids, factors, "silu"), want)
            if not error < 1e-2:
                wrong.append(f"{name} {tokens}: {error:.1e}")
        _, own = triton.choose(logits.float(), shape[1], sums_to_one=False)
        if not torch.allclose(own, factors, rtol=1e-4, atol=1e-6):
            wrong.append(f"choice {tokens}")
        together = invariant(x, ids, factors, "silu")
        for row in {0, tokens // 2, tokens - 1}:
            part = slice(row, row + 1)
            if not torch.equal(
                invariant(x[part], ids[part], factors[part], "silu"), together[part]
            ):
                wrong.append(f"bits of row {row} of {tokens}")
    return wrong


def coded(name: str, many: list[tuple[Tensor, Tensor]]) -> list[CodedExperts]:
    """Return layers with quantized weights, more of them than the L2 cache holds."""
    form, group = FORMS[name]
    found = []
    # A quantized layer has a quarter to half of the bytes of a bf16 layer, so more layers are
    # needed.
    for gate_up, down in many * 4:
        codes = [
            encode(each.flatten(0, 1), form, group, torch.float16, zeros=False)
            for each in (gate_up, down)
        ]
        made = pack_codes(*codes, len(gate_up), is_invariant=False)
        assert made is not None, f"{name} does not fit"
        found.append(made)
    return found


def measure_coded(
    name: str, form: str, tokens: int, packed: list[CodedExperts], many: list[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """Time quantized experts and bf16 experts, and compare the results of one layer."""
    shape = SHAPES[name]
    x, logits = inputs(shape, tokens)
    plain = [pack_experts(*each, implementation="triton") for each in many]
    reference = pack_experts(*packed[0].unpack(), implementation="triton")
    ids, factors = plain[0].choose(logits, shape[1], sums_to_one=False)
    want = reference(x.float(), ids, factors, "silu")
    took, in_bf16 = (
        graph_us([lambda p=p: step(p, x, logits, shape[1]) for p in ways])
        for ways in (packed, plain)
    )
    active = len(logits.topk(shape[1]).indices.unique())
    return {
        "shape": name,
        "form": form,
        "tokens": tokens,
        "us": took,
        "bf16_us": in_bf16,
        "over_bf16": in_bf16 / took,
        "gb_per_s": packed[0].size_bytes * active / shape[0] / took / 1e3,
        "error": relative_error(packed[0](x, ids, factors, "silu"), want),
    }


def measure(name: str, tokens: int, many: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Time the three implementations with one number of tokens."""
    shape = SHAPES[name]
    x, logits = inputs(shape, tokens)

    def timed(implementation: str) -> float:
        packed = [pack_experts(*each, implementation=implementation) for each in many]
        calls = [lambda p=p: step(p, x, logits, shape[1]) for p in packed]
        return graph_us(calls)

    found = {way: timed(way) for way in ("triton", "grouped", "triton_invariant")}
    active = len(logits.topk(shape[1]).indices.unique())
    moved = active * 3 * shape[2] * shape[3] * 2
    return {
        "shape": name,
        "tokens": tokens,
        "active": active,
        **{f"{way}_us": took for way, took in found.items()},
        "times_grouped": found["grouped"] / found["triton"],
        "gb_per_s": moved / found["triton"] / 1e3,
        "tflop_per_s": tokens * shape[1] * 6 * shape[2] * shape[3] / found["triton"] / 1e6,
    }


def tune(
    name: str, tokens: int, packed: Sequence[SortedExperts], tiles: Iterable[Tile], chosen: Tile
) -> dict[str, Any]:
    """Time every tile that the device can run."""
    shape = SHAPES[name]
    x, logits = inputs(shape, tokens)
    took: dict[Tile, float] = {}
    for tile in dict.fromkeys((chosen, *tiles)):
        calls: list[Callable[[], object]] = [
            lambda p=p, tile=tile: step(p, x, logits, shape[1], tile) for p in packed
        ]
        try:
            took[tile] = graph_us(calls, 7)
        except RuntimeError as error:
            print(f"  {tile}: {str(error).splitlines()[0]}", flush=True)
    best = min(took, key=lambda tile: took[tile])
    return {
        "shape": name,
        "tokens": tokens,
        "best": str(best),
        "best_us": took[best],
        "chosen": str(chosen),
        "chosen_us": took[chosen],
    }


def tune_plain(name: str, tokens: int, many: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Time the tiles of experts in bf16."""
    shape = SHAPES[name]
    packed = [TritonExperts(*each, is_invariant=False) for each in many]
    tiles = (*(tile for _, tile in TILES), INVARIANT, *OTHER_TILES)
    return tune(name, tokens, packed, tiles, tile_of(torch.bfloat16, tokens * shape[1], shape[0]))


def show(row: dict[str, Any]) -> None:
    print(*(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in row.items()), flush=True)


def main() -> None:
    """Check and measure; print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["A2.7B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.shape:
        if options.check:
            wrong = check(SHAPES[name])
            print(name, "; ".join(wrong) or "all agree", flush=True)
        many = layers(SHAPES[name])
        for tokens in options.tokens:
            if options.forms:
                break
            rows.append(
                tune_plain(name, tokens, many) if options.tune else measure(name, tokens, many)
            )
            show(rows[-1])
        for form in options.forms:
            codes = coded(form, many)
            for tokens in options.tokens:
                rows.append(
                    tune(
                        name,
                        tokens,
                        codes,
                        CODED_OTHERS,
                        codes[0].tile_of(tokens * SHAPES[name][1]),
                    )
                    if options.tune
                    else measure_coded(name, form, tokens, codes, many)
                )
                show(rows[-1])
    if options.json:
        write_json(options.json, {"environment": describe_environment(), "rows": rows})


if __name__ == "__main__":
    main()
