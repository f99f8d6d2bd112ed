"""Which graphs prompts have, and which lines of the host they read their inputs from."""

from __future__ import annotations

import pytest
import torch

from runtime.executor.extend_graphs import _shapes
from runtime.executor.graph_capture import HostBuffers


@pytest.mark.parametrize("num_steps", range(9))
def test_no_step_under_way_reads_a_free_line(num_steps: int) -> None:
    lines = HostBuffers(3, torch.device("cpu"))
    read = [lines.next().data_ptr() for _ in range(num_steps)]
    free = [line.data_ptr() for line in lines.free()]
    assert len(free) == 2
    assert not set(read[-2:]) & set(free)
    assert lines.next().data_ptr() == free[0]


@pytest.mark.parametrize(
    ("max_seqs", "few", "mixed"),
    [
        (1, 1, []),
        (3, 3, [3]),
        (96, 4, [96]),
        (110, 4, [110]),
        (128, 4, [96, 128]),
        (256, 4, [96, 256]),
        (4000, 4, [96, 256]),
    ],
)
def test_as_many_sequences_as_may_run_have_a_graph(
    max_seqs: int, few: int, mixed: list[int]
) -> None:
    shapes = _shapes([2, 64, 512], max_seqs)
    assert {shape.num_seqs for shape in shapes if not shape.has_decodes} == {few}
    assert sorted({shape.num_seqs for shape in shapes if shape.has_decodes}) == mixed
    assert all(shape.num_seqs <= shape.num_tokens for shape in shapes)
    # The first that holds a step is the smallest that does.
    assert shapes == sorted(shapes, key=lambda each: (each.has_decodes, each.num_seqs, each[0]))
