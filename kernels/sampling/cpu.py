"""Sampling on the CPU: masks through the C++ library, everything else in plain torch."""

import torch
from torch import Tensor

from kernels.cpu.library import library
from kernels.sampling.reference import (
    apply_logit_bias,
    apply_penalties,
    gather_logprobs,
    mask_tokens,
    nan_rows,
    sample,
)

__all__ = [
    "apply_logit_bias",
    "apply_penalties",
    "apply_token_bitmask",
    "gather_logprobs",
    "mask_tokens",
    "nan_rows",
    "sample",
]

_token_bitmask = library().hr_token_bitmask


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, row_index: Tensor | None = None) -> None:
    """Forbid the tokens whose bit is clear; see `kernels.sampling.apply_token_bitmask`."""
    assert logits.dtype is torch.float32
    assert logits.stride(1) == 1
    assert bitmask.dtype is torch.int32
    assert bitmask.is_contiguous()
    assert row_index is None or (row_index.is_contiguous() and row_index.dtype is torch.int64)
    num_rows, num_words = bitmask.shape
    assert num_words * 32 >= logits.shape[1]
    assert num_rows == logits.shape[0] if row_index is None else num_rows == len(row_index)
    _token_bitmask(
        logits.data_ptr(),
        bitmask.data_ptr(),
        None if row_index is None else row_index.data_ptr(),
        num_rows,
        logits.shape[1],
        logits.stride(0),
        num_words,
        torch.get_num_threads(),
    )
