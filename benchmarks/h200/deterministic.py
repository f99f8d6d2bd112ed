"""Checks deterministic inference on an NVIDIA GPU bit by bit, and measures its cost.

    python3 -m benchmarks.h200.deterministic [--only SECTION ...] [--json FILE]

The sections are:
- linear: compares all cuts of the batch-invariant product with each other, and its time with
  cuBLAS'.
- attention: compares a query alone, in chunks and in a batch, and times the ordinary kernels too.
- rows: compares a row alone with the same row in a batch, for sampling and all other ops.
- engine: runs sixteen requests one by one and under every way of scheduling, with tiny models and
  0.5b. A control run without the flag should give different bits.
- cost: times steps of 0.5b and 8b with the flag and without.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import time
from pathlib import Path
from typing import Any

import torch

from headrace.bench.environment import describe_environment, environment_line, write_json

SECTIONS = ("linear", "attention", "rows", "engine", "cost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--json", type=Path, help="write what was found")
    options = parser.parse_args()
    # A crash of a compiler or a driver should print the stack.
    faulthandler.enable()
    torch.manual_seed(1)
    environment = describe_environment()
    report: dict[str, Any] = {"environment": environment}
    print(environment_line(environment), flush=True)
    kernels = importlib.import_module("benchmarks.h200.deterministic_kernels")
    engines = importlib.import_module("benchmarks.h200.deterministic_engine")
    wrong: list[str] = []
    for name in options.only:
        began = time.perf_counter()
        section = getattr(kernels, name, None) or getattr(engines, name)
        print(f"== {name}", flush=True)
        found, lines = section()
        report[name] = {"wrong": found, "lines": lines}
        wrong += found
        for line in found:
            print(f"WRONG {line}")
        print(f"   {len(found)} wrong, {time.perf_counter() - began:.0f} s", flush=True)
        if options.json:
            write_json(options.json, report)
        gc.collect()
        torch.cuda.empty_cache()
    if wrong:
        raise SystemExit(f"{len(wrong)} checks failed")
    print("every bit is the same")


if __name__ == "__main__":
    main()
