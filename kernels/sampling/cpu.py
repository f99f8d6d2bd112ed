"""Sampling on the CPU: masks and greedy rows in C++, all other ops in plain torch."""

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
    "best_tokens",
    "gather_logprobs",
    "mask_tokens",
    "nan_rows",
    "sample",
]

_token_bitmask = library().hr_token_bitmask
_best_tokens = library().hr_best_tokens


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, row_index: Tensor | None = None) -> None:
    """Forbid tokens whose bit in a mask is 0; see `kernels.sampling.apply_token_bitmask`."""
    _check(logits, bitmask, row_index)
    num_rows, num_words = bitmask.shape
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


def best_tokens(
    logits: Tensor, bitmask: Tensor | None = None, row_index: Tensor | None = None
) -> Tensor:
    """Return the token of each row's largest logit; see `kernels.sampling.best_tokens`."""
    _check(logits, bitmask, row_index)
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    num_masks, num_words = (0, 0) if bitmask is None else bitmask.shape
    _best_tokens(
        tokens.data_ptr(),
        logits.data_ptr(),
        None if bitmask is None else bitmask.data_ptr(),
        None if row_index is None else row_index.data_ptr(),
        num_masks,
        num_rows,
        vocab_size,
        logits.stride(0),
        num_words,
        torch.get_num_threads(),
    )
    return tokens


def _check(logits: Tensor, bitmask: Tensor | None, row_index: Tensor | None) -> None:
    assert logits.dtype is torch.float32
    assert logits.stride(1) == 1
    if bitmask is None:
        return
    assert bitmask.dtype is torch.int32
    assert bitmask.is_contiguous()
    assert row_index is None or (row_index.is_contiguous() and row_index.dtype is torch.int64)
    num_masks, num_words = bitmask.shape
    assert num_words * 32 >= logits.shape[1]
    assert num_masks == logits.shape[0] if row_index is None else num_masks == len(row_index)
