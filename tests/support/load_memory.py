"""Measures the memory of loading a model.

Run as `python -m tests.support.load_memory FOLDER [IMPLEMENTATION]`. It prints the bytes of the
loaded weights, and the largest growth of the process. It is a separate process, because the memory
that malloc keeps depends on all earlier work of a process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from runtime.models.layers.build_context import BuildContext
from runtime.models.registry import read_model_spec
from runtime.weights.load_model import load_model, parameter_bytes


def anonymous_bytes() -> int:
    """Return the memory of this process without mapped files, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def main(folder: Path, implementation: str | None) -> None:
    context = BuildContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        linear=implementation,
        max_positions=16,
    )
    peak = before = anonymous_bytes()

    def sample(share: float) -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes())

    model = load_model(folder, read_model_spec(folder), context, sample)
    print(parameter_bytes(model), peak - before)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
