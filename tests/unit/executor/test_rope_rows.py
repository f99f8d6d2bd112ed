"""Positions of three axes, as `transformers` counts them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from runtime.executor.rope_rows import RopeRows
from runtime.step.step_plan import RowImage, StepPlan

CELL = 8
IMAGE_ID = 500


def plan_of(*parts: tuple[int, int, int]) -> StepPlan:
    """Return a step of prompt chunks, each as row, first position and number of tokens."""
    rows, starts, lens = (np.array(each, dtype=np.int64) for each in zip(*parts, strict=True))
    return StepPlan(rows, 0, starts, lens, np.zeros(lens.sum(), np.int32), lens > 0)


def positions(rope: RopeRows, plan: StepPlan) -> np.ndarray:
    indptr = np.concatenate([[0], plan.query_lens.cumsum()])
    places = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(plan.start_lens, plan.query_lens, strict=True)]
    )
    token_rows = np.repeat(plan.rows, plan.query_lens)
    shifted = rope.shift(plan, places, token_rows, indptr)
    return rope.axes(plan, shifted, indptr)


def random_prompt(seed: int) -> tuple[list[int], list[RowImage]]:
    source = random.Random(seed)
    ids: list[int] = []
    images: list[RowImage] = []
    for _ in range(source.randint(1, 4)):
        ids += [3] * source.randint(1, 9)
        rows, columns = source.randint(1, 6), source.randint(1, 6)
        images.append(RowImage(len(ids), rows * columns, (3, rows * CELL, columns * CELL)))
        ids += [IMAGE_ID] * (rows * columns)
    return ids + [3] * source.randint(1, 9), images


@pytest.mark.parametrize("seed", range(8))
def test_equal_to_transformers_for_any_chunks(seed: int) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    ids, images = random_prompt(seed)
    tokens = torch.tensor([ids])
    grids = torch.tensor([[1, i.size[1] // CELL * 2, i.size[2] // CELL * 2] for i in images])
    # Only the model's configuration is read.
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig()
    wanted, delta = model.get_rope_index(tokens, (tokens == IMAGE_ID).int(), grids)
    rope = RopeRows(4, CELL, torch.device("cpu"))
    rope.join(2, images)
    assert int(rope.delta[2]) == int(delta)
    assert np.array_equal(positions(rope, plan_of((2, 0, len(ids)))), wanted[:, 0].numpy())
    cut = len(ids) // 3 + 1
    parts = [(2, start, min(cut, len(ids) - start)) for start in range(0, len(ids), cut)]
    found = np.concatenate([positions(rope, plan_of(part)) for part in parts], axis=1)
    assert np.array_equal(found, wanted[:, 0].numpy())
    # Generated tokens continue from there.
    behind = positions(rope, plan_of((2, len(ids), 3)))
    assert np.array_equal(behind, np.repeat([np.arange(3) + len(ids) + int(delta)], 3, axis=0))


def test_rows_of_text_beside_one_with_an_image() -> None:
    rope = RopeRows(4, CELL, torch.device("cpu"))
    rope.join(1, [RowImage(2, 6, (3, 2 * CELL, 3 * CELL))])
    found = positions(rope, plan_of((0, 5, 2), (1, 6, 4), (3, 0, 1)))
    assert found.tolist() == [
        [5, 6, 2, 2, 5, 6, 0],
        [5, 6, 3, 3, 5, 6, 0],
        [5, 6, 3, 4, 5, 6, 0],
    ]


def test_a_row_forgets_the_previous_image() -> None:
    rope = RopeRows(2, CELL, torch.device("cpu"))
    rope.join(0, [RowImage(0, 6, (3, 2 * CELL, 3 * CELL))])
    rope.join(0, [])
    assert int(rope.delta[0]) == 0
    assert positions(rope, plan_of((0, 0, 3)))[0].tolist() == [0, 1, 2]


def test_a_number_of_tokens_that_does_not_fit_is_refused() -> None:
    rope = RopeRows(2, CELL, torch.device("cpu"))
    with pytest.raises(ValueError, match="an image of 2 x 3 vectors has 7"):
        rope.join(0, [RowImage(0, 7, (3, 2 * CELL, 3 * CELL))])
