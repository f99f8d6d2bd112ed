"""Checks bf16 on a GPU: its errors and those of `transformers`, and equal tokens.

    python -m benchmarks.h200.numerics [--json FILE]

The models are random and have the shapes of Llama, Qwen2 and Qwen3. An error is the norm of the
difference from float32 over the log-probabilities of prompts and outputs. Tokens are greedy, 40 for
each of six prompts, with and without CUDA graphs, and with and without overlap. If two of these
ways choose different tokens, the two tokens must be tied within bf16's precision.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from headrace.bench.environment import describe_environment, environment_line, write_json
from tests.support.gpu_numerics import SHAPES, WAYS, errors, same_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = describe_environment()
    print(environment_line(environment), flush=True)
    report: dict[str, Any] = {"environment": environment, "errors": [], "same_tokens": {}}
    for architecture in SHAPES:
        for backend in ("triton", "torch"):
            with tempfile.TemporaryDirectory() as folder:
                for found in errors(architecture, backend, Path(folder)):
                    print(found, flush=True)
                    report["errors"].append(found)
        with tempfile.TemporaryDirectory() as folder:
            report["same_tokens"][architecture] = same_tokens(architecture, Path(folder), WAYS)
        print(architecture, report["same_tokens"][architecture], flush=True)
    if options.json:
        write_json(options.json, report)


if __name__ == "__main__":
    main()
