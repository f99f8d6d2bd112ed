"""Times a layer's products with many tokens under sustained load, gate/up with its activation.

    python -m benchmarks.h200.products [--shape 8b 0.5b] [--tokens 2048 4096 8192]
        [--seconds 0.5] [--tune] [--json FILE]

First, the gate/up product with its activation in one kernel is compared with the product and the
activation in two steps. Then each product runs on random numbers for `--seconds`, and each layer
has its own weights. The ways to compute gate/up alternate. `--tune` also tries other tiles of the
one kernel, and adds the best three to the comparison.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.h200.sustained import Loop, Meter, Turn, in_turns, mean
from benchmarks.h200.timing import relative_error
from headrace.bench.environment import describe_environment, environment_line, write_json
from headrace.bench.shapes import SHAPES
from kernels.activation import act_and_mul
from kernels.linear import GATED_TOKENS
from kernels.linear.triton_gated import CUT, Cut, gated, supports

DEVICE = torch.device("cuda")
# Bytes of weights and inputs that are used in turn: more than the L2 cache holds.
ROTATED_BYTES = 300_000_000
ROUNDS = 2
BEST = 3
TWO_STEPS, ONE_KERNEL = "cublas + activation", "one kernel"

CUTS = [CUT, Cut(num_stages=4), Cut(group=16), Cut(num_stages=4, group=16)]
CUTS += [Cut(128, 128, 128, 8, 2), Cut(128, 64, 128, 8, 3), Cut(256, 64, 64, 8, 4)]
CUTS += [Cut(128, 64, 64, 4, 4), Cut(64, 128, 64, 4, 4)]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def random_weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a random weight; its products with random rows have about unit size."""
    return random(rows, columns, dtype=dtype).mul_(columns**-0.5)


def products_of(shape: str) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each weight of a layer."""
    config = SHAPES[shape]
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    return {
        "gate_up": (2 * inter, hidden),
        "qkv": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "down": (hidden, inter),
    }


def two_steps(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return act_and_mul(functional.linear(x, weight, bias), "silu")


def one_kernel(x: Tensor, weight: Tensor, bias: Tensor | None = None, cut: Cut = CUT) -> Tensor:
    return gated(x, weight, bias, "silu", cut)


def difference(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> str:
    """Describe how the one kernel's result differs from the two steps; empty if equal."""
    got, want = one_kernel(x, weight, bias, cut), two_steps(x, weight, bias)
    step = torch.finfo(x.dtype).eps
    error = relative_error(got, want)
    far = ~torch.isclose(got.float(), want.float(), rtol=4 * step, atol=4 * step)
    if error < step and not far.any():
        return ""
    where = far.nonzero()[:1].tolist()
    return f"relative error {error:.1e}, {int(far.sum())} of {far.numel()} far off, first {where}"


def check(
    widths: list[tuple[int, int]], tokens: list[int], cuts: list[Cut] | None = None
) -> list[str]:
    """Compare the one kernel with the two steps for each case; return the errors."""
    wrong = []
    for dtype in (torch.bfloat16, torch.float16):
        for width, columns in widths:
            weight, bias = random_weight(2 * width, columns, dtype), random(2 * width, dtype=dtype)
            if not supports(weight):
                wrong.append(f"{width} x {columns} {dtype}: not supported here")
                continue
            for num_tokens in tokens:
                x = random(num_tokens, columns, dtype=dtype)
                for added in (None, bias):
                    for cut in cuts or [CUT]:
                        what = f"{num_tokens} tokens, {width} x {columns}, {dtype}, {label(cut)}"
                        if off := difference(x, weight, added, cut):
                            wrong.append(f"{what}{', bias' * (added is not None)}: {off}")
    return wrong


def label(cut: Cut) -> str:
    """Return a short name of a tile."""
    words = [f"{cut.block_m}x{cut.block_n}x{cut.block_k}", f"w{cut.num_warps}"]
    return " ".join([*words, f"s{cut.num_stages}", f"g{cut.group}"])


class Operands:
    """Inputs and weights of one product; together they are larger than the L2 cache."""

    def __init__(self, rows: int, columns: int, tokens: int) -> None:
        count = max(2, ROTATED_BYTES // (2 * columns * (rows + tokens)))
        self.flops = 2 * tokens * rows * columns
        self.pairs = [(random(tokens, columns), random_weight(rows, columns)) for _ in range(count)]

    def loop(self, call: Callable[[Tensor, Tensor], Tensor]) -> Loop:
        return Loop([lambda x=x, w=w: call(x, w) for x, w in self.pairs])  # type: ignore[misc]


class Report:
    """The results: each is printed, and then saved if a path is given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.content: dict[str, Any] = {"environment": describe_environment(), "rows": []}
        print(environment_line(self.content["environment"]), flush=True)

    def save(self) -> None:
        if self._path is not None:
            write_json(self._path, self.content)

    def add(self, case: Mapping[str, Any], flops: int, turns: list[Turn]) -> Turn:
        taken = mean(turns)
        rate = flops / taken.us / 1e6
        row = {**case, "us": taken.us, "tflop_per_s": rate, "mhz": taken.mhz, "watts": taken.watts}
        self.content["rows"].append({**row, "turns_us": [turn.us for turn in turns]})
        self.save()
        clock, watts = (f"{v:.0f}" if v is not None else "-" for v in (taken.mhz, taken.watts))
        print(
            "{shape} {tokens} {product} by {by}:".format_map(dict(case)),
            f"{taken.us:.1f} us, {rate:.0f} TFLOP/s, {clock} MHz, {watts} W;",
            *(f"{turn.us:.1f}" for turn in turns),
            flush=True,
        )
        return taken


def measure(shape: str, tokens: int, seconds: float, meter: Meter, report: Report) -> None:
    """Time each product by cuBLAS, and gate/up with its activation in both ways."""
    case = {"shape": shape, "tokens": tokens}
    for product, (rows, columns) in products_of(shape).items():
        operands = Operands(rows, columns, tokens)
        calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cublas": functional.linear}
        if product == "gate_up":
            calls |= {TWO_STEPS: two_steps, ONE_KERNEL: one_kernel}
            tuned = report.content.get("tuned", {}).get(f"{shape} {tokens}", {})
            for name in list(tuned)[:BEST]:
                cut = next(cut for cut in CUTS if label(cut) == name)
                if cut != CUT:
                    calls[name] = lambda x, w, c=cut: one_kernel(x, w, None, c)  # type: ignore[misc]
        loops = {by: operands.loop(call) for by, call in calls.items()}
        found = in_turns(loops, seconds, meter, ROUNDS if len(calls) > 1 else 1)
        taken = {
            by: report.add({**case, "product": product, "by": by}, operands.flops, turns)
            for by, turns in found.items()
        }
        for by in list(calls)[2:]:
            change = taken[by].us / taken[TWO_STEPS].us - 1
            print(f"{shape} {tokens}: {by} {change:+.1%} time of {TWO_STEPS}", flush=True)


def tune(shape: str, tokens: int, seconds: float, meter: Meter, report: Report) -> None:
    """Time every tile once; the report lists the fastest first."""
    rows, columns = products_of(shape)["gate_up"]
    operands = Operands(rows, columns, tokens)
    found: dict[str, float] = {}
    for cut in CUTS:
        try:
            if off := difference(*operands.pairs[0], None, cut):
                print(f"{label(cut)}: {off}")
                continue
            loop = operands.loop(lambda x, w, c=cut: one_kernel(x, w, None, c))  # type: ignore[misc]
        except Exception as error:  # This tile does not compile or fit; the others go on.
            print(f"{label(cut)}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if not found:
            loop.turn(seconds, meter)
        found[label(cut)] = loop.turn(seconds, meter).us
    tuned = dict(sorted(found.items(), key=lambda item: item[1]))
    report.content.setdefault("tuned", {})[f"{shape} {tokens}"] = tuned
    report.save()
    print(f"{shape} {tokens} cuts:", *(f"{us:.1f} {name};" for name, us in tuned.items()))


def host_us(call: Callable[[], object], times: int = 50) -> float:
    """Return the host's microseconds for a call; `times` calls must fit into the GPU's queue."""
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        call()
    taken = time.perf_counter() - started
    torch.cuda.synchronize()
    return taken * 1e6 / times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=("8b", "0.5b"), default=["8b", "0.5b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--seconds", type=float, default=0.5, help="each way's turn lasts")
    parser.add_argument("--tune", action="store_true", help="try other cuts of the gated product")
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    torch.manual_seed(1)
    report = Report(options.json)
    # The widths of 8b, of 0.5b, of 0.5b on two ranks (where the last block is half full), and one
    # that is no multiple of a block.
    widths = [(14336, 4096), (4864, 896), (2432, 896), (1000, 1032)]
    wrong = check(widths, [1, 77, GATED_TOKENS + 1, 4096])
    if options.tune:
        wrong += check([(1000, 1032)], [300], CUTS)
    report.content["wrong"] = wrong
    report.save()
    print(f"checked: {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
    with Meter() as meter:
        x, weight = random(256, 896), random_weight(9728, 896)
        both = {ONE_KERNEL: lambda: one_kernel(x, weight), TWO_STEPS: lambda: two_steps(x, weight)}
        report.content["host_us"] = {by: host_us(call) for by, call in both.items()}
        print("the host's microseconds for a call:", report.content["host_us"], flush=True)
        for shape in options.shape:
            for tokens in options.tokens:
                if options.tune:
                    tune(shape, tokens, options.seconds / 2, meter, report)
                measure(shape, tokens, options.seconds, meter, report)
    if wrong:
        raise SystemExit(f"{len(wrong)} checks failed")


if __name__ == "__main__":
    main()
