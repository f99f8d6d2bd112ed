"""Times products with weights in bf16, fp8, int4 and int8, and compares them with memory's limit.

    python -m benchmarks.h200.weight_forms [--shape 8b 0.5b] [--tokens 1 4 16 64 256 2048]
        [--forms bf16 fp8 w4a16 ...] [--tune] [--json FILE]

Each product of a layer is timed in CUDA graphs. Each call has weights of its own, and together they
are larger than the L2 cache. The printed bound is the time that memory needs for the weight's
bytes, the tokens and the result, at the rate of a copy, which is measured first. From 256 tokens
on, the speed relative to bf16 says more than the bound. `--tune` also times other tiles of the
products with fp8 and 4-bit codes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200.products import DEVICE, ROTATED_BYTES, products_of, random, random_weight
from benchmarks.h200.timing import graph_us, relative_error
from headrace.bench.environment import describe_environment, environment_line, write_json
from kernels.fp8_linear import Blocks, Rounding
from kernels.fp8_linear import encode as encode_fp8
from kernels.fp8_linear.triton import MAX_TOKENS, Fp8Linear
from kernels.fp8_linear.triton import Tile as Fp8Tile
from kernels.fp8_linear.triton import multiply_few as multiply_few_fp8
from kernels.group_linear import Form, encode
from kernels.group_linear.triton import (
    Tile,
    TritonGroupedLinear,
    multiply_few,
    multiply_many,
    pack,
)
from kernels.linear import PackedLinear
from kernels.linear import pack as pack_plain
from kernels.linear.triton_gemv import Cut, gemv
from kernels.rounding.triton import round_tokens
from kernels.triton_support.compile_ahead import compiling_ahead
from kernels.triton_support.device import shared_memory
from kernels.triton_support.split_k import fits


def fp8(weight: Tensor) -> PackedLinear:
    """Quantize a weight to fp8 with one scale per row; activations are rounded per token."""
    return Fp8Linear(*encode_fp8(weight, Blocks(1, 0)), Rounding(), None)


def int8(weight: Tensor) -> PackedLinear:
    """Quantize a weight to int8 with one scale per row; activations are rounded per token."""
    codes = torch.int8
    return Fp8Linear(*encode_fp8(weight, Blocks(1, 0), codes), Rounding(codes=codes), None)


def grouped(form: Form, group: int, zeros: bool) -> Callable[[Tensor], PackedLinear]:
    """Return a function that quantizes a weight in groups of `group` columns."""

    def make(weight: Tensor) -> PackedLinear:
        codes = encode(weight, form, group or weight.shape[1], torch.float16, zeros=zeros)
        made = pack(codes, None, torch.bfloat16)
        assert made is not None
        return made

    return make


FORMS: dict[str, Callable[[Tensor], PackedLinear]] = {
    "bf16": lambda weight: pack_plain(weight, None),
    "fp8": fp8,
    "int8": int8,
    "w4a16": grouped("int4", 128, zeros=False),
    "w4a16-zeros": grouped("int4", 128, zeros=True),
    "w4a16-32": grouped("int4", 32, zeros=False),
    "mxfp4": grouped("mxfp4", 32, zeros=False),
    "w8a16": grouped("int8", 128, zeros=False),
}
DEFAULT_FORMS = ("bf16", "fp8", "w4a16", "mxfp4")
# The largest relative difference from the bf16 product that is allowed; the rounding of the weights
# causes it.
MOST_ERROR = {"fp8": 0.06, "int8": 0.03, "w8a16": 0.02, "mxfp4": 0.25}
TILES = [
    Tile(rows, split, warps, stages)
    for rows in (64, 128)
    for split in (1, 2, 4, 8)
    for warps in (4, 8)
    for stages in (3, 4, 6)
    if rows == 128 or warps == 4
]


def copy_rate() -> float:
    """Return the bytes per microsecond of a large copy, counting both reads and writes."""
    pairs = [torch.empty(2, 256 * 1024 * 1024, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    taken = graph_us([lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs])  # type: ignore[misc]
    return 2 * pairs[0].shape[1] / taken


class Weights:
    """Weights of one product in one form; together they are larger than the L2 cache."""

    def __init__(self, name: str, rows: int, columns: int) -> None:
        weight = random_weight(rows, columns)
        first = FORMS[name](weight)
        count = max(2, -(-ROTATED_BYTES // first.size_bytes))
        self.products = [first]
        self.products += [
            FORMS[name](random_weight(rows, columns)) for _ in range(min(count, 64) - 1)
        ]
        self.wrong = ""
        if name != "bf16":
            x = random(8, columns)
            error = relative_error(first(x), x @ weight.t())
            if error > MOST_ERROR.get(name, 0.15):
                self.wrong = f"{name} {rows}x{columns}: relative error {error:.3f}"

    def us(self, x: Tensor, call: Callable[[Any, Tensor], Tensor] | None = None) -> float:
        """Return the microseconds of one product."""
        run = call or (lambda product, given: product(given))
        return graph_us([lambda p=p: run(p, x) for p in self.products])  # type: ignore[misc]


def tune(
    name: str, weights: Weights, tokens: list[int], columns: int
) -> dict[str, dict[str, float]]:
    """Time tiles; above 128 tokens, also sizes of the slices that are unpacked to 16 bits."""
    found: dict[str, dict[str, float]] = {}
    for num_tokens in tokens:
        x = random(num_tokens, columns)
        taken: dict[str, float] = {}
        calls: dict[str, Callable[[TritonGroupedLinear, Tensor], Tensor]] = {
            f"{t.rows} split {t.split} w{t.num_warps} s{t.num_stages}": (
                lambda p, x, t=t: multiply_few(x, p.weight, None, t)  # type: ignore[misc]
            )
            for t in TILES
        }
        if num_tokens > 128:
            calls = {k: v for k, v in calls.items() if "split 1 " in k}
            calls |= {
                f"16 bits, {size} MiB": (
                    lambda p, x, s=size: multiply_many(x, p.weight, None, s * 2**20)  # type: ignore[misc]
                )
                for size in (8, 16, 32, 64, 1024)
            }
        for label, call in calls.items():
            try:
                taken[label] = weights.us(x, call)
            except Exception as error:  # One that does not fit; the others go on.
                print(f"{label}: {type(error).__name__}: {str(error)[:120]}")
        found[str(num_tokens)] = dict(sorted(taken.items(), key=lambda item: item[1]))
        best = [f"{us:.1f} {label}" for label, us in list(found[str(num_tokens)].items())[:5]]
        print(f"  {name} {num_tokens} tokens:", "; ".join(best), flush=True)
    return found


# Sizes for one token, whose programs have at most 64 numbers of each thread in registers.
CUTS = [
    Cut(rows, columns, warps)
    for rows in (1, 2, 4, 8)
    for columns in (1024, 2048, 4096)
    for warps in (4, 8)
    if 1024 < rows * columns <= 64 * 32 * warps
]
FP8_TILES = [
    Fp8Tile(rows, columns, split, warps, stages)
    for rows in (64, 128)
    for columns in (128, 256)
    for split in (1, 2, 4)
    for warps in (4, 8)
    for stages in (2, 3, 4, 6)
    if rows == 128 or warps == 4
]


def tune_fp8(weights: Weights, rows: int, num_tokens: int, columns: int) -> dict[str, float]:
    """Time tiles of the product with up to 64 tokens, whose activations are rounded already.

    `chosen` rounds the activations of one token; the tuned products do not.
    """
    x = round_tokens(random(num_tokens, columns), Rounding())
    calls: dict[str, Callable[[Fp8Linear], Tensor]] = {}
    if num_tokens == 1:
        plain = random(1, columns)
        for cut in CUTS:
            label = f"{cut.rows}x{cut.columns} w{cut.num_warps}"
            calls[label] = lambda p, cut=cut: gemv(plain, p.codes, None, cut, scales=p.scales)  # type: ignore[misc]
        calls["not rounded"] = lambda p: multiply_few_fp8(plain, None, p.codes, p.scales, None)
    else:
        block_m = max(16, num_tokens)
        size = shared_memory(DEVICE).size - 1024
        for t in FP8_TILES:
            in_flight = t.num_stages * (t.rows + block_m) * t.columns
            has_room = fits(-(-rows // t.rows), t.rows * block_m, t.split)
            if in_flight > size or (t.split > 1 and not has_room):
                continue
            label = f"{t.rows}x{t.columns} split {t.split} w{t.num_warps} s{t.num_stages}"
            calls[label] = lambda p, t=t: multiply_few_fp8(  # type: ignore[misc]
                x.codes, x.scales, p.codes, p.scales, None, t
            )
    calls["chosen"] = lambda p: multiply_few_fp8(x.codes, x.scales, p.codes, p.scales, None)
    first = weights.products[0]
    assert isinstance(first, Fp8Linear)
    with compiling_ahead() as requests:
        if requests is not None:
            for call in calls.values():
                call(first)
    taken = {label: weights.us(x.codes, lambda p, _, c=call: c(p)) for label, call in calls.items()}  # type: ignore[misc]
    found = dict(sorted(taken.items(), key=lambda item: item[1]))
    best = [f"{us:.2f} {label}" for label, us in list(found.items())[:6]]
    print(f"  fp8 {num_tokens} tokens, chosen {taken['chosen']:.2f}:", "; ".join(best), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=("8b", "0.5b"), default=["8b", "0.5b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256, 2048])
    parser.add_argument("--forms", nargs="+", choices=tuple(FORMS), default=list(DEFAULT_FORMS))
    parser.add_argument(
        "--tune", action="store_true", help="time other tiles of fp8 and 4-bit codes"
    )
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    torch.manual_seed(1)
    report: dict[str, Any] = {"environment": describe_environment(), "rows": [], "tuned": {}}
    print(environment_line(report["environment"]))
    rate = report["copy_gb_per_s"] = copy_rate() / 1e3
    print(f"a copy: {rate:.0f} GB/s; us (share of the bytes' bound, speed over bf16's)", flush=True)
    wrong = []
    for shape in options.shape:
        for product, (rows, columns) in products_of(shape).items():
            plain: dict[int, float] = {}
            for name in options.forms:
                weights = Weights(name, rows, columns)
                wrong += [weights.wrong] if weights.wrong else []
                shown = []
                for num_tokens in options.tokens:
                    x = random(num_tokens, columns)
                    taken = weights.us(x)
                    if name == "bf16":
                        plain[num_tokens] = taken
                    moved = weights.products[0].size_bytes + 2 * num_tokens * (rows + columns)
                    row = {
                        "shape": shape, "product": product, "form": name, "tokens": num_tokens,
                        "us": taken, "bound_share": moved / rate / 1e3 / taken,
                        "over_bf16": plain[num_tokens] / taken if plain else None,
                    }  # fmt: skip
                    report["rows"].append(row)
                    over = f", {row['over_bf16']:.2f}x" if plain else ""
                    shown.append(f"{num_tokens}: {taken:.1f} ({row['bound_share']:.0%}{over})")
                print(f"{shape} {product} {rows}x{columns} {name}:", "  ".join(shown), flush=True)
                if options.tune and name in ("w4a16", "mxfp4"):
                    key = f"{shape} {product} {name}"
                    report["tuned"][key] = tune(name, weights, options.tokens, columns)
                if options.tune and name == "fp8":
                    report["tuned"][f"{shape} {product} fp8"] = {
                        num_tokens: tune_fp8(weights, rows, num_tokens, columns)
                        for num_tokens in options.tokens
                        if num_tokens <= MAX_TOKENS
                    }
                del weights
    report["wrong"] = wrong
    if options.json:
        write_json(options.json, report)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
