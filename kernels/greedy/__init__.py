"""Computes the most probable token of each row, and its logits in float32, in one pass."""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["GREEDY", "NAN_TOKEN", "GreedyKernels", "greedy_tokens"]

# Marks a row whose logits contain NaN.
NAN_TOKEN = -1


class GreedyKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def greedy_tokens(self, logits: Tensor, wide: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Copy logits and return the largest one's token; see `kernels.greedy.greedy_tokens`."""


GREEDY: Table[GreedyKernels] = Table(
    "greedy",
    {
        "reference": Entry("kernels.greedy.reference", invariant=True),
        "triton": Entry(
            "kernels.greedy.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> GreedyKernels:
    return GREEDY.choose(device_type).kernels


def greedy_tokens(logits: Tensor, wide: Tensor, wanted: Tensor | None = None) -> Tensor:
    """Copy logits to float32 and return the token with the largest logit in each row.

    Of equal logits, the first is taken.

    Args:
        logits: `[num_rows, vocab_size]`, float16, bfloat16 or float32, contiguous.
        wide: `[num_rows, vocab_size]` float32, contiguous; overwritten with the logits. May be
            `logits` itself.
        wanted: `[1]` int64. If it holds 0, `wide` need not be written and is then undefined.

    Returns:
        `[num_rows]` int64; `NAN_TOKEN` if a row has a NaN.
    """
    return _kernels(logits.device.type).greedy_tokens(logits, wide, wanted)
