"""Inputs of a decode step in one launch; as ten small ones they took 30 microseconds on an H200."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel takes what it touches

import triton
import triton.language as tl
from torch import Tensor

from kernels.decode_inputs import DecodeInputs

_BLOCK = 1024


@triton.jit
def _decode_inputs_kernel(
    rows_ptr,
    seq_lens_ptr,
    last_token_ptr,
    page_table_ptr,
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    lens_ptr,
    table_ptr,
    max_pages,
    page_size,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    row = tl.load(rows_ptr + seq)
    pages_ptr = page_table_ptr + row * max_pages
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < max_pages
    pages = tl.load(pages_ptr + column, mask=inside, other=0)
    tl.store(table_ptr + seq.to(tl.int64) * max_pages + column, pages, mask=inside)
    if tl.program_id(1) == 0:
        seq_len = tl.load(seq_lens_ptr + seq)
        position = seq_len - 1
        page = tl.load(pages_ptr + position // page_size).to(tl.int64)
        tl.store(input_ids_ptr + seq, tl.load(last_token_ptr + row))
        tl.store(positions_ptr + seq, position)
        tl.store(slots_ptr + seq, page * page_size + position % page_size)
        tl.store(lens_ptr + seq, seq_len.to(tl.int32))


def decode_inputs(
    rows: Tensor, seq_lens: Tensor, last_token: Tensor, page_table: Tensor, page_size: int
) -> DecodeInputs:
    """Gather the inputs; see `kernels.decode_inputs.decode_inputs`."""
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
            last_token,
            page_table,
            *gathered,
            max_pages,
            page_size,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return gathered
