"""Checks bf16 on a GPU: errors against float32 beside those of `transformers`, and equal tokens.

    python -m benchmarks.h200.numerics [--json FILE]

Random models of Llama's, Qwen2's and Qwen3's shape. Errors are norms over log-probabilities of
prompts and outputs. Tokens are greedy, 40 for each of six prompts, with CUDA graphs and without,
overlapped and plain. If two ways choose different tokens, these must be tied within bf16's
precision.
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
