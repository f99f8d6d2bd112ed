"""Inputs and outputs of a decode step in plain torch."""

import torch
from torch import Tensor

from kernels.decode_step import DecodeInputs


def fetch_inputs(buffers: Tensor, turn: Tensor, inputs: Tensor) -> None:
    """Copy the host's next buffer to the device; see `kernels.decode_step.fetch_inputs`."""
    turn.copy_((turn + 1) % len(buffers))
    buffer = buffers.index_select(0, turn.to(buffers.device))
    inputs.copy_(buffer[0, : len(inputs)])


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
    positions = seq_lens - 1
    entries = rows * page_table.shape[1] + positions // page_size
    known = page_table.view(-1).index_select(0, entries)
    pages = torch.where(new_pages > 0, new_pages.to(torch.int32), known)
    page_table.view(-1).index_copy_(0, entries, pages)
    input_ids = last_token.index_select(0, rows)
    latest_input.index_copy_(0, rows, input_ids)
    return DecodeInputs(
        input_ids=input_ids,
        positions=positions,
        slots=pages.to(torch.int64) * page_size + positions % page_size,
        seq_lens=seq_lens.to(torch.int32),
        page_table=page_table.index_select(0, rows),
    )


def decode_outputs(
    token_ids: Tensor, rows: Tensor, turn: Tensor, last_token: Tensor, kept: Tensor
) -> None:
    """Store the new tokens of a decode step; see `kernels.decode_step.decode_outputs`."""
    last_token.index_copy_(0, rows, token_ids.clamp(min=0))
    entries = turn * kept.shape[1] + torch.arange(len(token_ids), device=token_ids.device)
    kept.view(-1).index_copy_(0, entries.to(kept.device), token_ids.to(kept.device))
