"""bf16 with graphs and without, overlapped and plain: the same tokens, but for ties of bf16."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu_numerics import PROMPT_LENGTHS, SHAPES, WAYS, same_tokens


@pytest.mark.parametrize("architecture", SHAPES)
def test_every_way_gives_the_same_tokens(architecture: str, tmp_path: Path) -> None:
    found = same_tokens(architecture, tmp_path, WAYS)
    # On an H200 all six were, but one of Qwen2's between graphs and none, which parted at a tie.
    assert min(found.values()) >= len(PROMPT_LENGTHS) - 2, found
    assert found["eager, overlapped"] == len(PROMPT_LENGTHS), "the same kernels, the same steps"
