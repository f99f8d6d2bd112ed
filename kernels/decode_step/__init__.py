"""The ops before and after the layers of a decode step.

They gather the inputs from tables on the device, which have a row for each running request, and
store the new tokens there.
"""

from functools import cache
from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = [
    "DECODE_STEP",
    "DecodeInputs",
    "DecodeStepKernels",
    "decode_inputs",
    "decode_outputs",
    "fetch_inputs",
]


class DecodeInputs(NamedTuple):
    """The inputs of a decode step, which has one token per sequence.

    Attributes:
        input_ids: `[num_seqs]` int64.
        positions: `[num_seqs]` int64, each token's position in its sequence.
        slots: `[num_seqs]` int64, the slot mapping: `page * page_size + offset` of that position.
        seq_lens: `[num_seqs]` int32, number of keys including this step's token.
        page_table: `[num_seqs, max_pages]` int32, the block table.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    page_table: Tensor


class DecodeStepKernels(Protocol):
    """The functions that each implementation of these ops provides."""

    def fetch_inputs(self, buffers: Tensor, turn: Tensor, inputs: Tensor) -> None:
        """Copy the host's next buffer to the device; see `kernels.decode_step.fetch_inputs`."""

    def decode_inputs(
        self,
        rows: Tensor,
        seq_lens: Tensor,
        new_pages: Tensor,
        last_token: Tensor,
        latest_input: Tensor,
        page_table: Tensor,
        page_size: int,
    ) -> DecodeInputs:
        """Gather the inputs of a decode step; see `kernels.decode_step.decode_inputs`."""

    def decode_outputs(
        self, token_ids: Tensor, rows: Tensor, turn: Tensor, last_token: Tensor, kept: Tensor
    ) -> None:
        """Store the new tokens of a decode step; see `kernels.decode_step.decode_outputs`."""


DECODE_STEP: Table[DecodeStepKernels] = Table(
    "decode_step",
    {
        "reference": Entry("kernels.decode_step.reference", invariant=True),
        "triton": Entry(
            "kernels.decode_step.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> DecodeStepKernels:
    return DECODE_STEP.choose(device_type).kernels


def fetch_inputs(buffers: Tensor, turn: Tensor, inputs: Tensor) -> None:
    """Copy the next of the host's buffers to the device.

    The call never blocks and may be captured in a CUDA graph.

    Args:
        buffers: `[num_buffers, buffer_length]` int64, contiguous; may be pinned host memory. The
            host may rewrite a buffer once an event recorded after this launch has completed.
        turn: `[1]` int64, index of the buffer that was copied last. It is advanced to the next
            buffer, and from the last one to 0.
        inputs: `[count]` int64, contiguous; receives the first `count` numbers of the buffer.
    """
    _kernels(inputs.device.type).fetch_inputs(buffers, turn, inputs)


def decode_inputs(
    rows: Tensor,
    seq_lens: Tensor,
    new_pages: Tensor,
    last_token: Tensor,
    latest_input: Tensor,
    page_table: Tensor,
    page_size: int,
) -> DecodeInputs:
    """Gather the inputs of a decode step from the device's tables of running requests.

    A row holds the state of one running request on the device. The call never blocks and may be
    captured in a CUDA graph.

    Args:
        rows: `[num_seqs]` int64, the rows that decode.
        seq_lens: `[num_seqs]` int64, number of each sequence's keys including this step's token, at
            least 1.
        new_pages: `[num_seqs]` int64, the number of the page that begins with the new token, to be
            written to `page_table`; 0 if the token is in a page that the row already has.
        last_token: `[num_rows]` int64, each row's next input.
        latest_input: `[num_rows]` int64, also receives the inputs, for a step that must be
            repeated.
        page_table: `[num_rows, max_pages]` int32, contiguous.
        page_size: tokens per page.
    """
    return _kernels(rows.device.type).decode_inputs(
        rows, seq_lens, new_pages, last_token, latest_input, page_table, page_size
    )


def decode_outputs(
    token_ids: Tensor, rows: Tensor, turn: Tensor, last_token: Tensor, kept: Tensor
) -> None:
    """Store new tokens as their rows' next inputs, and in memory that the host reads.

    Args:
        token_ids: `[num_seqs]` int64. A negative number means no token; the next input is then 0.
        rows: `[num_seqs]` int64, the rows to which the tokens belong.
        turn: `[1]` int64, the row of `kept` to write.
        last_token: `[num_rows]` int64, changed.
        kept: `[num_turns, max_seqs]` int64, changed; may be pinned host memory. The host can read
            the tokens once an event recorded after this launch has completed.
    """
    _kernels(token_ids.device.type).decode_outputs(token_ids, rows, turn, last_token, kept)
