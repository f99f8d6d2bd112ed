"""What a decode step reads, gathered from the running batch's rows."""

from functools import cache
from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["DECODE_INPUTS", "DecodeInputs", "DecodeInputsKernels", "decode_inputs"]


class DecodeInputs(NamedTuple):
    """Inputs of one decode step, a token a sequence.

    Attributes:
        input_ids: `[num_seqs]` int64.
        positions: `[num_seqs]` int64, each token's place in its sequence.
        slots: `[num_seqs]` int64, `page * page_size + offset` of that place.
        seq_lens: `[num_seqs]` int32, keys once this token's is written.
        page_table: `[num_seqs, max_pages]` int32.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    page_table: Tensor


class DecodeInputsKernels(Protocol):
    """What an implementation of this op offers."""

    def decode_inputs(
        self,
        rows: Tensor,
        seq_lens: Tensor,
        last_token: Tensor,
        page_table: Tensor,
        page_size: int,
    ) -> DecodeInputs:
        """See `kernels.decode_inputs.decode_inputs`."""


DECODE_INPUTS: Table[DecodeInputsKernels] = Table(
    "decode_inputs",
    {
        "reference": Entry("kernels.decode_inputs.reference", invariant=True),
        "triton": Entry(
            "kernels.decode_inputs.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> DecodeInputsKernels:
    return DECODE_INPUTS.choose(device_type).kernels


def decode_inputs(
    rows: Tensor, seq_lens: Tensor, last_token: Tensor, page_table: Tensor, page_size: int
) -> DecodeInputs:
    """Gather the inputs of a decode step; waits for nothing, may be captured in a graph.

    Args:
        rows: `[num_seqs]` int64, which rows decode.
        seq_lens: `[num_seqs]` int64, keys of each once this step's is written, at least 1.
        last_token: `[num_rows]` int64, each row's next input.
        page_table: `[num_rows, max_pages]` int32, contiguous.
        page_size: tokens of a page.
    """
    return _kernels(rows.device.type).decode_inputs(
        rows, seq_lens, last_token, page_table, page_size
    )
