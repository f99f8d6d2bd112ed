"""In-place changes to single logits in Triton: one or two launches each, which never block."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
# Bytes for counts of generated tokens. A row of counts has the size of the vocabulary; rows are
# processed together as far as these bytes allow.
_COUNT_BYTES = 64 * 2**20
# Parts of this many rows begin at addresses that are aligned to 16 bytes, like whole tensors,
# because four float32 fill 16 bytes. For other alignments Triton would compile again.
_ALIGNED_ROWS = 4


# The kernel is not specialized on the number of biases, which changes with the batch.
@triton.jit(do_not_specialize=["count"])
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
    logits_row = tl.load(index_ptr + row) if INDEXED else row
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    word = tl.load(bitmask_ptr + row * mask_stride + at // 32, mask=inside, other=-1)
    forbidden = ((word >> (at % 32)) & 1) == 0
    tl.store(logits_ptr + logits_row * stride + at, float("-inf"), mask=inside & forbidden)


# The kernel is not specialized on the stride of outputs, which grow with every step.
@triton.jit(do_not_specialize=["ids_stride"])
def _count_kernel(ids_ptr, lens_ptr, counts_ptr, ids_stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(lens_ptr + row)
    token = tl.load(ids_ptr + row * ids_stride + at, mask=inside, other=0)
    tl.atomic_add(counts_ptr + row * vocab_size + token, 1, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["ids_stride"])
def _penalty_kernel(
    logits_ptr,
    index_ptr,
    ids_ptr,
    lens_ptr,
    counts_ptr,
    frequency_ptr,
    presence_ptr,
    repetition_ptr,
    stride,
    ids_stride,
    vocab_size,
    INDEXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_row = tl.load(index_ptr + row) if INDEXED else row
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(lens_ptr + row)
    token = tl.load(ids_ptr + row * ids_stride + at, mask=inside, other=0)
    # Exactly one position of a token gets its count and changes the logit. It leaves a zero for the
    # rows that use the memory next.
    count = tl.atomic_xchg(
        counts_ptr + row * vocab_size + token, tl.zeros_like(at), mask=inside, sem="relaxed"
    )
    mine = inside & (count > 0)
    address = logits_ptr + logits_row * stride + token
    old = tl.load(address, mask=mine, other=0.0)
    factor = tl.load(repetition_ptr + row) + tl.zeros_like(old)
    repeated = tl.where(old >= 0, tl.div_rn(old, factor), old * factor)
    frequent = tl.load(frequency_ptr + row) * count.to(tl.float32)
    tl.store(address, repeated - frequent - tl.load(presence_ptr + row), mask=mine)


def apply_penalties(
    logits: Tensor,
    output_ids: Tensor,
    output_lens: Tensor,
    frequency: Tensor,
    presence: Tensor,
    repetition: Tensor,
    row_index: Tensor | None = None,
    *,
    count_bytes: int = _COUNT_BYTES,
) -> None:
    """Lower the logits of generated tokens; see `kernels.sampling.apply_penalties`.

    Rows are processed in parts whose counts take about `count_bytes`.
    """
    assert logits.stride(1) == 1
    num_rows, max_len = output_ids.shape
    vocab_size = logits.shape[1]
    if num_rows == 0 or max_len == 0:
        return
    assert output_ids.stride(1) == 1
    fit = count_bytes // (4 * vocab_size)
    at_once = max(_ALIGNED_ROWS, fit - fit % _ALIGNED_ROWS)
    counts = torch.zeros(
        min(num_rows, at_once), vocab_size, dtype=torch.int32, device=logits.device
    )
    for start in range(0, num_rows, at_once):
        part = slice(start, start + at_once)
        ids, lens = output_ids[part], output_lens[part]
        grid = (len(ids), triton.cdiv(max_len, _BLOCK))
        _count_kernel[grid](ids, lens, counts, ids.stride(0), vocab_size, BLOCK=_BLOCK)
        _penalty_kernel[grid](
            logits[part] if row_index is None else logits,
            lens if row_index is None else row_index[part],
            ids,
            lens,
            counts,
            frequency[part],
            presence[part],
            repetition[part],
            logits.stride(0),
            ids.stride(0),
            vocab_size,
            INDEXED=row_index is not None,
            BLOCK=_BLOCK,
        )


def apply_logit_bias(logits: Tensor, row_index: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Add values to single logits in place; see `kernels.sampling.apply_logit_bias`.

    Values for the same position are added in any order, so the last bit of their sum may vary.
    """
    _edit(logits, row_index, token_ids, values)


def mask_tokens(logits: Tensor, row_index: Tensor, token_ids: Tensor) -> None:
    """Set single logits to minus infinity in place; see `kernels.sampling.mask_tokens`."""
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
    """Forbid tokens whose bit in a mask is 0; see `kernels.sampling.apply_token_bitmask`.

    The logits of forbidden tokens are written without being read.
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
