"""Times how much adapters (LoRA) add to a layer's matrix products when the batch has few tokens.

    python -m benchmarks.h200.adapter_products [--shape 8b] [--tokens 1 64] [--adapters 1 8 64]
        [--rank 16] [--tune] [--workers 8] [--json FILE]

Each product is timed in CUDA graphs, once without adapters and once with them. The gate/up product
includes its activation. Each call uses other base weights and other adapters than the call before,
and together they are larger than the L2 cache. The printed bound is the time that memory needs for
the weights, the adapters in use, the tokens and the result, at the rate of a copy, which is
measured first. The result of every variant is compared with products in float32. `--tune` also
times other launch parameters ("cuts"). `--workers` sets the number of processes that compile these
variants first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200.products import DEVICE, ROTATED_BYTES, products_of, random, random_weight
from benchmarks.h200.timing import graph_us, relative_error
from benchmarks.h200.weight_forms import copy_rate
from headrace.bench.environment import describe_environment, environment_line, write_json
from headrace.bench.shapes import SHAPES
from kernels.activation import act_and_mul
from kernels.linear import pack
from kernels.lora import LoraPart, TokenSlots, bank_width
from kernels.lora.triton import Cut, TritonBank, cut_of

MOST_ERROR = 0.01
ORDERS = ("first", "last", "beside", "within")
# Each entry: columns per step, programs that share all columns, and warps.
SHRINKS = [(128, 32, 2), (128, 16, 4), (256, 16, 4), (256, 8, 2), (512, 8, 4), (256, 28, 4)]
# Each entry: columns per program, and warps.
EXPANDS = [(32, 1), (64, 1), (64, 4), (128, 2), (128, 4), (256, 4)]
SHARES = (1, 2, 4, 8)
STAGES = (1, 2, 3, 6)


def parts_of(shape: str, product: str, rows: int) -> list[LoraPart]:
    """Return the parts of a product that have adapters of their own."""
    if product == "gate_up":
        return [LoraPart(0, rows // 2), LoraPart(rows // 2, rows // 2)]
    if product != "qkv":
        return [LoraPart(0, rows)]
    config = SHAPES[shape]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    q, kv = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    return [LoraPart(0, q), LoraPart(q, kv), LoraPart(q + kv, kv)]


class Product:
    """One matrix product, with more weights and adapters than the L2 cache holds."""

    def __init__(self, shape: str, name: str, num_slots: int, rank: int, copies: int) -> None:
        self.name, self.rank, self.num_slots = name, rank, num_slots
        rows, self.columns = products_of(shape)[name]
        parts = parts_of(shape, name, rows)
        self.width = bank_width(self.columns, parts)
        copies = copies or max(2, -(-ROTATED_BYTES // (2 * rows * self.columns)))
        self.bases = [pack(random_weight(rows, self.columns), None) for _ in range(copies)]
        ranks = torch.full((num_slots,), rank, dtype=torch.int32, device=DEVICE)
        self.banks = []
        for _ in range(copies):
            memory = random(num_slots, rank, self.width).mul_(self.columns**-0.5)
            self.banks.append(TritonBank(memory, ranks, self.columns, parts))

    def moved(self, num_tokens: int, adapters: int) -> int:
        """Return the least number of bytes that the product must move through memory."""
        base = self.bases[0]
        out = base.out_features // (2 if self.name == "gate_up" else 1)
        adapted = adapters * self.rank * self.width
        return base.size_bytes + 2 * (adapted + num_tokens * (self.columns + out))

    def slots(self, num_tokens: int, adapters: int, first: int) -> Tensor:
        """Return an adapter slot for each token; the tokens use `adapters` slots in turn."""
        slot = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE) % adapters
        return ((slot + first) % self.num_slots).to(torch.int32)

    def base_us(self, x: Tensor) -> float:
        """Return the microseconds of the product without adapters."""
        gates = self.name == "gate_up"
        return graph_us(
            [
                (lambda b=base: b.gated(x, "silu")) if gates else (lambda b=base: b(x))  # type: ignore[misc]
                for base in self.bases
            ]
        )

    def cut(self, num_tokens: int, num_slots: int) -> Cut:
        """Return the launch parameters in use."""
        return cut_of(self.columns, num_tokens, num_slots, gates=self.banks[0].gates)

    def run(self, index: int, x: Tensor, tokens: TokenSlots, cut: Cut) -> Tensor:
        """Compute the product with adapters."""
        base, bank = self.bases[index % len(self.bases)], self.banks[index % len(self.banks)]
        bank.cut = cut
        if self.name == "gate_up":
            return bank.gated(base, x, "silu", tokens)
        return bank.product(base, x, tokens)

    def us(self, x: Tensor, adapters: int, cut: Cut) -> float:
        """Return the microseconds with adapters; building the token list is not timed."""
        count = max(len(self.bases), min(64, self.num_slots) // adapters)
        steps = [
            TokenSlots(self.slots(len(x), adapters, adapters * index), self.num_slots)
            for index in range(count)
        ]
        calls: list[Callable[[], object]] = [
            lambda i=index, t=tokens: self.run(i, x, t, cut)  # type: ignore[misc]
            for index, tokens in enumerate(steps)
        ]
        return graph_us(calls)

    def wanted(self, x: Tensor, adapters: int) -> Tensor:
        """Return the expected first product, in float32, for tokens whose slots start at 1."""
        bank, wide = self.banks[0], self.bases[0](x).float()
        for token, slot in enumerate(self.slots(len(x), adapters, 1).tolist()):
            for index, part in enumerate(bank.parts):
                a, b = bank.shrinks(index)[slot].float(), bank.expands(index)[slot].float()
                wide[token, part.first : part.first + part.num_rows] += (a @ x[token].float()) @ b
        return act_and_mul(wide, "silu") if self.name == "gate_up" else wide


def cuts(columns: int, used: Cut, num_tokens: int) -> Iterator[tuple[str, Cut]]:
    """Yield the launch parameters in use and alternatives, each named by its difference."""
    for order in ORDERS:
        yield order, replace(used, order=order)
    if num_tokens > 1:
        for shares in SHARES:
            yield f"shares {shares}", replace(used, shares=shares)
    for width, splits, warps in SHRINKS:
        steps = max(1, -(-columns // (width * splits)))
        cut = replace(used, columns=width, steps=steps, shrink_warps=warps)
        yield f"shrink {width}x{steps} w{warps}", cut
    for width, warps in EXPANDS:
        yield f"expand {width} w{warps}", replace(used, width=width, expand_warps=warps)
    for stages in STAGES:
        yield f"stages {stages}", replace(used, num_stages=stages)


def cases(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    for num_tokens in options.tokens:
        for adapters in options.adapters:
            if adapters <= num_tokens:
                yield num_tokens, adapters


def compile_part(options: argparse.Namespace) -> None:
    """Compile the share of the variants that this process was given."""
    part, parts = options.compile
    index = 0
    for name in products_of(options.shape):
        product = Product(options.shape, name, 2, options.rank, 1)
        for num_tokens in options.tokens:
            x = random(num_tokens, product.columns)
            slots = torch.zeros(num_tokens, dtype=torch.int32, device=DEVICE)
            used = product.cut(num_tokens, max(options.adapters))
            for _, cut in cuts(product.columns, used, num_tokens):
                index += 1
                if index % parts == part:
                    product.run(0, x, TokenSlots(slots, 2), cut)
    torch.cuda.synchronize()


def compile_ahead(options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "benchmarks.h200.adapter_products", "--shape", options.shape]
    command += ["--rank", str(options.rank), "--tokens", *map(str, options.tokens)]
    command += ["--adapters", *map(str, options.adapters), "--compile"]
    count = options.workers
    started = [subprocess.Popen([*command, str(part), str(count)]) for part in range(count)]
    for process in started:
        process.wait()


def time_case(
    product: Product, num_tokens: int, adapters: int, rate: float, wrong: list[str], *, tune: bool
) -> dict[str, Any]:
    """Time the variants of one product, print the times, and append errors to `wrong`."""
    x, columns = random(num_tokens, product.columns), product.columns
    used = product.cut(num_tokens, product.num_slots)
    variants = [("used", used)]
    variants += cuts(columns, used, num_tokens) if tune else []
    base, want = product.base_us(x), product.wanted(x, adapters)
    case = f"{product.name} {num_tokens} tokens, {adapters} adapters"
    taken: dict[str, float] = {}
    for label, cut in variants:
        try:
            slots = TokenSlots(product.slots(num_tokens, adapters, 1), product.num_slots)
            error = relative_error(product.run(0, x, slots, cut), want)
            taken[label] = product.us(x, adapters, cut)
        except Exception as failure:  # One that does not fit; the others go on.
            print(f"{case}, {label}: {type(failure).__name__}: {str(failure)[:200]}")
            continue
        if not error < MOST_ERROR:
            wrong.append(f"{case}, {label}: relative error {error:.3f}")
    bound = product.moved(num_tokens, adapters) / rate / 1e3
    shown = "; ".join(
        f"{us:.1f} {label}" for label, us in sorted(taken.items(), key=lambda item: item[1])
    )
    print(f"{case}: base {base:.1f}, bound {bound:.1f}; {shown}", flush=True)
    row = {"product": product.name, "tokens": num_tokens, "adapters": adapters}
    return row | {"base_us": base, "bound_us": bound, "us": taken}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=("8b", "0.5b"), default="8b")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tune", action="store_true", help="time other cuts")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile them")
    parser.add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    torch.manual_seed(1)
    if options.compile:
        compile_part(options)
        return
    if options.tune:
        compile_ahead(options)
    report: dict[str, Any] = {"environment": describe_environment(), "rows": []}
    print(environment_line(report["environment"]))
    rate = report["copy_gb_per_s"] = copy_rate() / 1e3
    print(f"a copy: {rate:.0f} GB/s; us (share of the bytes' bound)", flush=True)
    wrong: list[str] = []
    sums: dict[tuple[int, int], list[float]] = {}
    for name in products_of(options.shape):
        product = Product(options.shape, name, max(options.adapters), options.rank, 0)
        for num_tokens, adapters in cases(options):
            row = time_case(product, num_tokens, adapters, rate, wrong, tune=options.tune)
            report["rows"].append(row)
            us = row["us"]
            each = [row["base_us"], us["used"], min(us.values()), row["bound_us"]]
            sums.setdefault((num_tokens, adapters), []).extend(each)
        del product
    for (num_tokens, adapters), each in sums.items():
        base, used_us, best_us, bound = (sum(each[kind::4]) for kind in range(4))
        print(
            f"a layer, {num_tokens} tokens, {adapters} adapters: base {base:.1f}, used "
            f"{used_us:.1f}, best {best_us:.1f}, bound {bound:.1f}"
        )
    report["wrong"] = wrong
    if options.json:
        write_json(options.json, report)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
