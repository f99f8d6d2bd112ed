"""Rows of LoRA adapters, which `kernels.linear.triton` multiplies like rows of the weight.

A separate kernel for these rows costs a launch, which in a decode step takes longer than its work.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class AdapterRows(NamedTuple):
    """Rows of LoRA adapters that a launch multiplies in addition to the rows of the weight.

    P is the length of each list in `step`, at least the number of tokens. A place is an index in
    these lists.

    Attributes:
        memory: `[num_slots, num_ranks, width]`, the dtype of the weight. The entry of a rank begins
            with one row of `in_features` numbers for each part of the product.
        step: the adapters of the tokens, int32: `[place of the token P | index of its adapter, -1
            for none P | slots of the adapters P | their ranks in use P | number of adapters]`.
        most: most adapters that the tokens may have.
        made: `[split_k, num_parts, P, ranks]` float32, written: the products of the token at each
            place with the rows of its adapter. `ranks` is a multiple of 16, at least `num_ranks`.
            Ranks that are not in use get zeros. Nothing is written for tokens without an adapter.
    """

    memory: Tensor
    step: Tensor
    most: int
    made: Tensor


@triton.jit
def adapter_rows(
    row,
    memory_ptr,
    step_ptr,
    in_features,
    slot_stride,
    rank_stride,
    PARTS: tl.constexpr,
    PLACES: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return pointers to rows of the step's adapters, `[rows, 1]`, and whether they are in use."""
    adapter, part, rank = row // (PARTS * RANKS), row // RANKS % PARTS, row % RANKS
    at = step_ptr + 2 * PLACES + adapter
    is_row = adapter < tl.load(step_ptr + 4 * PLACES)
    slot = tl.load(at, mask=is_row, other=0).to(tl.int64)
    is_row = is_row & (rank < tl.load(at + PLACES, mask=is_row, other=0))
    at_row = slot * slot_stride + rank.to(tl.int64) * rank_stride + part * in_features
    return memory_ptr + at_row[:, None], is_row


@triton.jit
def store_shrunk(
    acc,
    row,
    token,
    split,
    step_ptr,
    made_ptr,
    num_tokens,
    PARTS: tl.constexpr,
    PLACES: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Store the products `[rows, tokens]`: of each adapter's rows, those with its own tokens."""
    adapter, part, rank = row // (PARTS * RANKS), row // RANKS % PARTS, row % RANKS
    is_token = token < num_tokens
    place = tl.load(step_ptr + token, mask=is_token, other=0)
    index = tl.load(step_ptr + PLACES + token, mask=is_token, other=-1)
    to = ((split * PARTS + part)[:, None] * PLACES + place[None, :]) * RANKS + rank[:, None]
    tl.store(made_ptr + to, acc, mask=adapter[:, None] == index[None, :])
