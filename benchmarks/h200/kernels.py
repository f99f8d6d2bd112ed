"""Checks and times the Triton kernels on an NVIDIA GPU.

python3 -m benchmarks.h200.kernels [--only SECTION ...] [--tune] [--no-measure] [--out FILE]
"""

import argparse
import importlib
from pathlib import Path

import torch

from headrace.bench.environment import describe_environment, write_json

SECTIONS = ("attention", "prompt_attention", "shared_prefix", "layer_ops", "sampling", "linear")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--tune", action="store_true", help="time other tile sizes too")
    parser.add_argument("--no-measure", action="store_true", help="check (and tune) only")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    torch.manual_seed(1)
    report: dict[str, object] = {"environment": describe_environment()}
    wrong: list[str] = []
    table: list[dict[str, object]] = []
    for name in args.only:
        section = importlib.import_module(f"benchmarks.h200.{name}")
        wrong += section.check()
        print(f"{name}: checked, {len(wrong)} wrong so far", *wrong, sep="\n  ", flush=True)
        if args.tune and hasattr(section, "tune"):
            report[f"{name}_tune"] = section.tune()
        if not args.no_measure:
            table += section.measure()
    report["wrong"] = wrong
    report["measured"] = table
    if args.out:
        write_json(args.out, report)
    show(table)
    if wrong:
        raise SystemExit(f"{len(wrong)} checks failed")


def show(table: list[dict[str, object]]) -> None:
    for row in table:
        extra = " ".join(
            f"{key}={value:.1f}" if isinstance(value, float) else f"{key}={value}"
            for key, value in row.items()
            if key not in ("model", "case") and value is not None
        )
        print(f"{row['model']:>5} {row['case']:<28} {extra}")


if __name__ == "__main__":
    main()
