"""The most probable token of each row, and the row's logits in float32, in one pass."""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["GREEDY", "NAN_TOKEN", "GreedyKernels", "greedy_tokens"]

# Marks a row whose logits contain NaN.
NAN_TOKEN = -1


class GreedyKernels(Protocol):
    """The functions of an implementation of this op."""

    def greedy_tokens(self, logits: Tensor, wide: Tensor, wanted: Tensor | None = None) -> Tensor:
        """See `kernels.greedy.greedy_tokens`."""


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
    """Copy logits to float32 and return the largest one's token, the first of equal ones.

    Args:
        logits: `[num_rows, vocab_size]`, float16, bfloat16 or float32, contiguous.
        wide: `[num_rows, vocab_size]` float32, contiguous; overwritten. May be `logits` itself.
        wanted: `[1]` int64; if it holds 0, `wide` may stay unwritten and is then undefined.

    Returns:
        `[num_rows]` int64; `NAN_TOKEN` if a row has a NaN.
    """
    return _kernels(logits.device.type).greedy_tokens(logits, wide, wanted)
