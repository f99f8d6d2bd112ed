"""Which parts are summed through shared memory; the sums themselves need GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.distributed.group import MAX_BYTES, OneShotAllReduce, TensorGroup


@pytest.fixture
def one_shot() -> OneShotAllReduce:
    """With memory of this process, and a sum that doubles."""
    return OneShotAllReduce(torch.zeros(MAX_BYTES, dtype=torch.uint8), lambda part: 2 * part)


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((1, 4096), torch.bfloat16, True),
        ((256, 4096), torch.bfloat16, True),
        ((257, 4096), torch.bfloat16, False),
        ((128, 4096), torch.float32, True),
        ((1, 4096), torch.float16, False),
        # Not a whole number of 16 bytes.
        ((1, 4), torch.bfloat16, False),
        ((0, 4096), torch.bfloat16, False),
    ],
)
def test_what_fits(
    shape: tuple[int, int], dtype: torch.dtype, fits: bool, one_shot: OneShotAllReduce
) -> None:
    place = one_shot.place(shape, dtype)
    assert (place is not None) == fits
    if place is not None:
        assert (place.shape, place.dtype) == (shape, dtype)
        assert one_shot.holds(place)
    assert not one_shot.holds(torch.zeros(1, 4096, dtype=torch.bfloat16))


def test_only_what_lies_there_is_summed_there(
    one_shot: OneShotAllReduce, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_others: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", by_others.append)
    group = object.__new__(TensorGroup)
    group._one_shot = one_shot
    place = group.place(2, 32, torch.bfloat16)
    assert place is not None
    total = group.all_reduce(place.fill_(3))
    assert not one_shot.holds(total), "the next part would overwrite it"
    assert total.eq(6).all()
    elsewhere = torch.ones(2, 32, dtype=torch.bfloat16)
    assert group.all_reduce(elsewhere) is elsewhere
    assert by_others == [elsewhere]
    group._one_shot = None
    assert group.place(2, 32, torch.bfloat16) is None
