"""bf16 with graphs and without, overlapped and plain: the same tokens, but for ties of bf16."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu_numerics import SHAPES, WAYS, same_tokens


@pytest.mark.parametrize("architecture", SHAPES)
def test_every_way_gives_the_same_tokens(architecture: str, tmp_path: Path) -> None:
    print(architecture, same_tokens(architecture, tmp_path, WAYS))
