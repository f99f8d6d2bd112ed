"""What changes single logits in place, in Triton; one launch each, nothing waits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _bias_kernel(
    logits_ptr, rows_ptr, tokens_ptr, values_ptr, count, stride, FORBID: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = tl.load(rows_ptr + i, mask=inside, other=0)
    token = tl.load(tokens_ptr + i, mask=inside, other=0)
    if FORBID:
        tl.store(logits_ptr + row * stride + token, float("-inf"), mask=inside)
    else:
        value = tl.load(values_ptr + i, mask=inside, other=0.0)
        tl.atomic_add(logits_ptr + row * stride + token, value, mask=inside, sem="relaxed")


@triton.jit
def _bitmask_kernel(
    logits_ptr,
    bitmask_ptr,
    index_ptr,
    stride,
    mask_stride,
    vocab_size,
    INDEXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(index_ptr + row) if INDEXED else row
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    word = tl.load(bitmask_ptr + row * mask_stride + at // 32, mask=inside, other=-1)
    forbidden = ((word >> (at % 32)) & 1) == 0
    tl.store(logits_ptr + line * stride + at, float("-inf"), mask=inside & forbidden)


def apply_logit_bias(logits: Tensor, row_index: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Add to single logits; see `kernels.sampling.apply_logit_bias`.

    Values for one place are added in any order, so their sum may differ in its last bit.
    """
    _edit(logits, row_index, token_ids, values)


def mask_tokens(logits: Tensor, row_index: Tensor, token_ids: Tensor) -> None:
    """Forbid single tokens; see `kernels.sampling.mask_tokens`."""
    _edit(logits, row_index, token_ids, None)


def _edit(logits: Tensor, row_index: Tensor, token_ids: Tensor, values: Tensor | None) -> None:
    assert logits.stride(1) == 1
    count = row_index.shape[0]
    if count:
        _bias_kernel[(triton.cdiv(count, 128),)](
            logits,
            row_index,
            token_ids,
            logits if values is None else values,
            count,
            logits.stride(0),
            FORBID=values is None,
            BLOCK=128,
        )


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, row_index: Tensor | None = None) -> None:
    """Forbid the tokens whose bit is clear; see `kernels.sampling.apply_token_bitmask`.

    Logits are written where they are forbidden and never read.
    """
    assert logits.stride(1) == 1
    assert bitmask.stride(1) == 1
    vocab_size = logits.shape[1]
    if logits.numel() and len(bitmask):
        _bitmask_kernel[(len(bitmask), triton.cdiv(vocab_size, _BLOCK))](
            logits,
            bitmask,
            bitmask if row_index is None else row_index,
            logits.stride(0),
            bitmask.stride(0),
            vocab_size,
            INDEXED=row_index is not None,
            BLOCK=_BLOCK,
        )
