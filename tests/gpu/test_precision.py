"""bf16 on the GPU beside float32: as near as `transformers` in bf16 is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu_numerics import SHAPES, errors


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_as_near_to_float32_as_transformers(
    architecture: str, backend: str, tmp_path: Path
) -> None:
    for found in errors(architecture, backend, tmp_path):
        assert found["ours"] <= 1.25 * found["transformers"], found
