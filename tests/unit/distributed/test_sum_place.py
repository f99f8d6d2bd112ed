"""Products that are summed over ranks are written to the memory that the sum reads."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.linear import Linear

SHARED = torch.zeros(4, 24)


def place(num_rows: int, width: int) -> Tensor | None:
    return SHARED[:num_rows, :width] if num_rows <= len(SHARED) else None


def test_a_part_lies_in_its_place_when_it_is_summed() -> None:
    summed: list[Tensor] = []

    def double(part: Tensor) -> Tensor:
        """As if the other rank had the same part."""
        summed.append(part)
        return 2 * part

    context = BuildContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        tp_size=2,
        all_reduce=double,
        sum_place=place,
        linear="reference",
    )
    linear = Linear.row_parallel(32, 24, False, context)
    weight = torch.randn(24, 16)
    linear.matrix.weight.rows("").copy_(weight)
    linear.finalize([])
    for num_tokens, is_shared in ((4, True), (2, True), (5, False)):
        x = torch.randn(num_tokens, 16)
        assert torch.allclose(linear.apply(x), 2 * (x @ weight.T), atol=1e-5)
        assert (summed[-1].data_ptr() == SHARED.data_ptr()) == is_shared
