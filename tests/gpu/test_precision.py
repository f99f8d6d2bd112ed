"""bf16 on the GPU is as close to float32 as `transformers` in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu_numerics import SHAPES, errors


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_as_near_to_float32_as_transformers(
    architecture: str, backend: str, tmp_path: Path
) -> None:
    ours, theirs = {"prompt": 0.0, "output": 0.0}, {"prompt": 0.0, "output": 0.0}
    for found in errors(architecture, backend, tmp_path):
        ours[found["part"]] += found["ours"] ** 2
        theirs[found["part"]] += found["transformers"] ** 2
    # A prompt has many times the positions of its output, whose errors would drown in its own.
    for part in ours:
        assert ours[part] ** 0.5 <= 1.25 * theirs[part] ** 0.5, (part, ours, theirs)
