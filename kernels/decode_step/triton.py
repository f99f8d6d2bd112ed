"""The inputs and outputs of a decode step in a few launches.

The first kernel of a step reads the host's inputs directly from host memory. With a copy before
each graph instead, the device was idle for 17 microseconds of a step on an H200, compared with 3
microseconds now. Gathering the inputs in ten small launches took 30 microseconds.

The outputs are written directly to pinned host memory. Before this kernel, five operations ran
between the graphs of two steps: a copy to the host, a copy that protected the tokens from the next
step, and the writes of the rows' next inputs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import triton
import triton.language as tl
from torch import Tensor

from kernels.decode_step import DecodeInputs
from kernels.triton_support.launch import launch_options, wait_for_inputs

_BLOCK = 1024
_SEQ_BLOCK = 128


# The kernel is not specialized on the count, which depends on the batch size.
@triton.jit(do_not_specialize=["count"])
def _fetch_inputs_kernel(
    buffers_ptr,
    turn_ptr,
    inputs_ptr,
    num_turns,
    buffer_length,
    count,
    BLOCK: tl.constexpr,
):
    """Copy one buffer and advance `turn`.

    The kernel must run as one program, because a second program could read `turn` after the first
    has advanced it.
    """
    turn = (tl.load(turn_ptr) + 1) % num_turns
    tl.debug_barrier()
    tl.store(turn_ptr, turn)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < count
        number = tl.load(buffers_ptr + turn * buffer_length + at, mask=inside)
        tl.store(inputs_ptr + at, number, mask=inside)


def fetch_inputs(buffers: Tensor, turn: Tensor, inputs: Tensor) -> None:
    """Copy the host's next buffer to the device; see `kernels.decode_step.fetch_inputs`."""
    assert buffers.is_contiguous()
    assert inputs.is_contiguous()
    count = len(inputs)
    assert count <= buffers.shape[1]
    # Host memory has a high latency, so a long buffer is read in few iterations.
    is_long = count > _BLOCK
    _fetch_inputs_kernel[(1,)](
        buffers,
        turn,
        inputs,
        len(buffers),
        buffers.shape[1],
        count,
        BLOCK=8 * _BLOCK if is_long else _BLOCK,
        num_warps=16 if is_long else 4,
    )


@triton.jit
def _decode_inputs_kernel(
    rows_ptr,
    seq_lens_ptr,
    new_pages_ptr,
    last_token_ptr,
    latest_input_ptr,
    page_table_ptr,
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    lens_ptr,
    table_ptr,
    max_pages,
    page_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    seq = tl.program_id(0)
    row = tl.load(rows_ptr + seq)
    new_page = tl.load(new_pages_ptr + seq).to(tl.int32)
    position = tl.load(seq_lens_ptr + seq) - 1
    entry = position // page_size
    pages_ptr = page_table_ptr + row * max_pages
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < max_pages
    pages = tl.load(pages_ptr + column, mask=inside, other=0)
    is_new = column == tl.where(new_page > 0, entry, -1)
    pages = tl.where(is_new, new_page, pages)
    tl.store(pages_ptr + column, pages, mask=inside & is_new)
    tl.store(table_ptr + seq.to(tl.int64) * max_pages + column, pages, mask=inside)
    if tl.program_id(1) == 0:
        # Another program may be writing the entry of a new page now, so it is not read.
        page = tl.load(pages_ptr + entry)
        page = tl.where(new_page > 0, new_page, page).to(tl.int64)
        token = tl.load(last_token_ptr + row)
        tl.store(input_ids_ptr + seq, token)
        tl.store(latest_input_ptr + row, token)
        tl.store(positions_ptr + seq, position)
        tl.store(slots_ptr + seq, page * page_size + position % page_size)
        tl.store(lens_ptr + seq, (position + 1).to(tl.int32))


def decode_inputs(
    rows: Tensor,
    seq_lens: Tensor,
    new_pages: Tensor,
    last_token: Tensor,
    latest_input: Tensor,
    page_table: Tensor,
    page_size: int,
) -> DecodeInputs:
    """Gather the inputs of a decode step; see `kernels.decode_step.decode_inputs`."""
    assert page_table.is_contiguous()
    num_seqs, max_pages = rows.shape[0], page_table.shape[1]
    gathered = DecodeInputs(
        input_ids=last_token.new_empty(num_seqs),
        positions=seq_lens.new_empty(num_seqs),
        slots=seq_lens.new_empty(num_seqs),
        seq_lens=page_table.new_empty(num_seqs),
        page_table=page_table.new_empty(num_seqs, max_pages),
    )
    if num_seqs:
        _decode_inputs_kernel[(num_seqs, triton.cdiv(max_pages, _BLOCK))](
            rows,
            seq_lens,
            new_pages,
            last_token,
            latest_input,
            page_table,
            *gathered,
            max_pages,
            page_size,
            BLOCK=_BLOCK,
            num_warps=4,
            **launch_options(rows.device),
        )
    return gathered


@triton.jit
def _decode_outputs_kernel(
    token_ids_ptr,
    rows_ptr,
    turn_ptr,
    last_token_ptr,
    kept_ptr,
    num_seqs,
    buffer_length,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = seq < num_seqs
    token = tl.load(token_ids_ptr + seq, mask=inside, other=0)
    row = tl.load(rows_ptr + seq, mask=inside, other=0)
    tl.store(last_token_ptr + row, tl.maximum(token, 0), mask=inside)
    tl.store(kept_ptr + tl.load(turn_ptr) * buffer_length + seq, token, mask=inside)


def decode_outputs(
    token_ids: Tensor, rows: Tensor, turn: Tensor, last_token: Tensor, kept: Tensor
) -> None:
    """Store the new tokens of a decode step; see `kernels.decode_step.decode_outputs`."""
    num_seqs = len(token_ids)
    assert kept.is_contiguous()
    assert num_seqs <= kept.shape[1]
    if num_seqs:
        _decode_outputs_kernel[(triton.cdiv(num_seqs, _SEQ_BLOCK),)](
            token_ids,
            rows,
            turn,
            last_token,
            kept,
            num_seqs,
            kept.shape[1],
            BLOCK=_SEQ_BLOCK,
            num_warps=4,
            **launch_options(token_ids.device),
        )
