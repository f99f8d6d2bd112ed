"""Inputs of a decode step in plain torch."""

import torch
from torch import Tensor

from kernels.decode_inputs import DecodeInputs


def decode_inputs(
    rows: Tensor, seq_lens: Tensor, last_token: Tensor, page_table: Tensor, page_size: int
) -> DecodeInputs:
    """Gather the inputs; see `kernels.decode_inputs.decode_inputs`."""
    positions = seq_lens - 1
    table = page_table.index_select(0, rows)
    pages = table.gather(1, (positions // page_size).unsqueeze(1)).squeeze(1)
    return DecodeInputs(
        input_ids=last_token.index_select(0, rows),
        positions=positions,
        slots=pages.to(torch.int64) * page_size + positions % page_size,
        seq_lens=seq_lens.to(torch.int32),
        page_table=table,
    )
