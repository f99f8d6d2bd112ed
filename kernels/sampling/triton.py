"""Sampling in Triton without a sort of the vocabulary and without synchronisation with the host.

A row is split over several blocks. Probabilities are added in fixed point (2**-38), and in the
reference in float32 or float64, so results may differ in the last bit. A draw at the edge between
two tokens may therefore choose the other token. With top-p, a token may be kept or removed if the
mass up to it equals `top_p` to seven digits. Within this implementation a row's result never
depends on its batch. A token with less than 2**-38 of the mass is never drawn.

The kernels are in `triton_rows` (statistics, cut of top-k and top-p), `triton_draw` (draw, ranking)
and `triton_edit` (penalties, biases, masks).
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.greedy.triton import greedy_tokens
from kernels.sampling.candidates import top_candidates
from kernels.sampling.reference import nan_rows
from kernels.sampling.rows import SamplingRows
from kernels.sampling.triton_draw import (
    count_kernel,
    draw_kernel,
    gather_kernel,
    mass_kernel,
    place_kernel,
    rank_kernel,
)
from kernels.sampling.triton_edit import (
    apply_logit_bias,
    apply_penalties,
    apply_token_bitmask,
    mask_tokens,
)
from kernels.sampling.triton_rows import (
    BLOCK,
    CANDIDATES,
    FEW_CANDIDATES,
    SUB_BLOCKS,
    bound_kernel,
    collect_kernel,
    cut_candidates_kernel,
    cut_row_kernel,
    stats_kernel,
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


# More log-probabilities than this are sorted by torch, because they would not fit in registers.
_MOST_LOGPROBS = 4096
# Up to this many, which is more than OpenAI's API allows, one compiled kernel ranks any number.
_FEW_LOGPROBS = 32


@dataclass(frozen=True)
class _Stats:
    """Statistics of rows and of their blocks.

    `block_` tensors are `[batch, num_blocks]`; the other tensors are `[batch]`.
    """

    num_blocks: int
    block_max: Tensor
    block_sum: Tensor
    row_max: Tensor
    normaliser: Tensor
    best: Tensor
    bound: Tensor
    count: Tensor


def _describe(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    ranks: Tensor | None,
) -> _Stats:
    """Compute statistics of the rows; `top_k`, `top_p`, `min_p` are `None` if no row uses them.

    Args:
        logits: `[batch, vocab_size]` float32.
        temperature: `[batch]` float32; `None` for 1.
        top_k: `[batch]` int32.
        top_p: `[batch]` float32.
        min_p: `[batch]` float32.
        ranks: `[batch]` float32, above 0 for rows with rank filters; `None` if there are none.
    """
    assert logits.dtype is torch.float32
    assert logits.stride(1) == 1
    batch, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    ranked = top_k is not None

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    block_max, block_sum = empty(batch, num_blocks), empty(batch, num_blocks)
    block_best = empty(batch, num_blocks, dtype=torch.int32)
    sub_max = empty(batch, num_blocks * SUB_BLOCKS) if ranked else block_max
    stats = _Stats(
        num_blocks,
        block_max,
        block_sum,
        empty(batch),
        empty(batch),
        empty(batch, dtype=torch.int64),
        empty(batch, dtype=torch.int32),
        empty(batch, dtype=torch.int32),
    )
    stats_kernel[(batch, num_blocks)](
        logits,
        logits if temperature is None else temperature,
        block_max,
        block_sum,
        block_best,
        sub_max,
        stats.count,
        logits.stride(0),
        vocab_size,
        SCALED=temperature is not None,
        RANKED=ranked,
        BLOCK=BLOCK,
        SUBS=SUB_BLOCKS,
        num_warps=8,
    )
    bound_kernel[(batch,)](
        logits if ranks is None else ranks,
        logits if top_k is None else top_k,
        logits if top_p is None else top_p,
        logits if min_p is None else min_p,
        block_max,
        block_sum,
        block_best,
        sub_max,
        stats.row_max,
        stats.normaliser,
        stats.bound,
        stats.best,
        num_blocks,
        vocab_size,
        RANKED=ranked,
        SUBS=SUB_BLOCKS,
        BLOCKS=triton.next_power_of_2(num_blocks),
        # The number of warps does not depend on ranking, because it affects the rounding of the
        # normaliser's sum.
        num_warps=8,
    )
    return stats


def _cut(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    stats: _Stats,
) -> tuple[Tensor, Tensor]:
    """Return the limit that top-k and top-p set in each row; see `triton_rows` for keys and cuts.

    Returns:
        `[batch]` int32, the sort key at each row's cut, and `[batch]` int64, how many tokens with
        exactly this key are kept.
    """
    batch, vocab_size = logits.shape
    candidates = torch.empty(batch, CANDIDATES, dtype=torch.int32, device=logits.device)
    cut_key = torch.empty(batch, dtype=torch.int32, device=logits.device)
    cut_ties = torch.empty(batch, dtype=torch.int64, device=logits.device)
    scale = logits if temperature is None else temperature
    collect_kernel[(batch, stats.num_blocks)](
        logits,
        scale,
        stats.block_max,
        stats.bound,
        stats.count,
        candidates,
        logits.stride(0),
        vocab_size,
        SCALED=temperature is not None,
        BLOCK=BLOCK,
        CANDIDATES=CANDIDATES,
        num_warps=8,
    )
    # Exactly one of these kernels cuts a row; the others exit immediately for this row.
    for width, at_least in ((FEW_CANDIDATES, 0), (CANDIDATES, FEW_CANDIDATES + 1)):
        cut_candidates_kernel[(batch,)](
            top_k,
            top_p,
            min_p,
            stats.row_max,
            stats.normaliser,
            stats.bound,
            stats.count,
            candidates,
            cut_key,
            cut_ties,
            vocab_size,
            CANDIDATES=CANDIDATES,
            WIDTH=width,
            AT_LEAST=at_least,
            num_warps=4,
        )
    cut_row_kernel[(batch,)](
        logits,
        scale,
        top_k,
        top_p,
        min_p,
        stats.block_max,
        stats.row_max,
        stats.normaliser,
        stats.bound,
        stats.count,
        cut_key,
        cut_ties,
        logits.stride(0),
        vocab_size,
        stats.num_blocks,
        SCALED=temperature is not None,
        BLOCK=BLOCK,
        CANDIDATES=CANDIDATES,
        num_warps=16,
    )
    return cut_key, cut_ties


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Choose one token per row; see `kernels.sampling.sample`."""
    batch, vocab_size = logits.shape
    if batch == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    if rows.all_greedy:
        return _describe(logits, None, None, None, None, None).best
    ranked = rows.any_top_k or rows.any_top_p
    temperature = rows.temperature
    stats = _describe(
        logits,
        temperature,
        rows.top_k if ranked else None,
        rows.top_p if ranked else None,
        rows.min_p if ranked else None,
        temperature,
    )
    cut_key, cut_ties = stats.count, stats.count
    if ranked:
        cut_key, cut_ties = _cut(logits, temperature, rows.top_k, rows.top_p, rows.min_p, stats)
    mass = torch.empty(batch, stats.num_blocks, dtype=torch.int64, device=logits.device)
    ties = torch.empty(batch, stats.num_blocks, dtype=torch.int32, device=logits.device)
    mass_kernel[(batch, stats.num_blocks)](
        logits,
        temperature,
        rows.min_p,
        stats.block_max,
        stats.block_sum,
        stats.row_max,
        stats.normaliser,
        cut_key,
        mass,
        ties,
        logits.stride(0),
        vocab_size,
        RANKED=ranked,
        BLOCK=BLOCK,
        num_warps=8,
    )
    draw_kernel[(batch,)](
        logits,
        temperature,
        rows.min_p,
        rows.seed,
        rows.position,
        stats.row_max,
        stats.normaliser,
        cut_key,
        cut_ties,
        mass,
        ties,
        stats.best,
        logits.stride(0),
        vocab_size,
        stats.num_blocks,
        RANKED=ranked,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(stats.num_blocks),
        num_warps=8,
    )
    return stats.best


def _look_up(logits: Tensor, token_ids: Tensor, stats: _Stats) -> Tensor:
    """Return the float32 log-probabilities of `token_ids`, `[batch, num_ids]` int64."""
    out = torch.empty(token_ids.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        gather_kernel[(triton.cdiv(out.numel(), 64),)](
            logits,
            token_ids.contiguous(),
            stats.row_max,
            stats.normaliser,
            out,
            out.numel(),
            token_ids.shape[1],
            logits.stride(0),
            BLOCK=64,
        )
    return out


def best_tokens(
    logits: Tensor, bitmask: Tensor | None = None, row_index: Tensor | None = None
) -> Tensor:
    """Return the token of each row's largest logit; see `kernels.sampling.best_tokens`."""
    if bitmask is not None:
        apply_token_bitmask(logits, bitmask, row_index)
    return greedy_tokens(logits, logits)


def gather_logprobs(logits: Tensor, token_ids: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of tokens; see `kernels.sampling.gather_logprobs`."""
    batch, vocab_size = logits.shape
    top_k = min(top_k, vocab_size)
    device = logits.device
    values = torch.empty(batch, top_k, dtype=torch.float32, device=device)
    ids = torch.empty(batch, top_k, dtype=torch.int64, device=device)
    if batch == 0:
        return torch.empty(token_ids.shape, dtype=torch.float32, device=device), values, ids
    is_ranked = 0 < top_k <= _MOST_LOGPROBS
    # A `top_k` of the vocabulary's size means off, so every token survives.
    wanted = torch.full((batch,), top_k, dtype=torch.int32, device=device) if is_ranked else None
    ones = torch.ones(batch, dtype=torch.float32, device=device) if is_ranked else None
    stats = _describe(logits, None, wanted, ones, ones, ones)
    chosen = _look_up(logits, token_ids, stats)
    if top_k > _MOST_LOGPROBS:
        ids = top_candidates(logits, top_k)[1]
        return chosen, _look_up(logits, ids, stats), ids
    if wanted is None or ones is None:
        return chosen, values, ids
    cut_key, cut_ties = _cut(logits, None, wanted, ones, ones, stats)
    above = torch.empty(batch, stats.num_blocks, dtype=torch.int32, device=device)
    ties = torch.empty_like(above)
    ranked = torch.empty(batch, top_k, dtype=torch.int64, device=device)
    grid = (batch, stats.num_blocks)
    count_kernel[grid](
        logits,
        stats.block_max,
        cut_key,
        above,
        ties,
        logits.stride(0),
        vocab_size,
        BLOCK=BLOCK,
        num_warps=8,
    )
    place_kernel[grid](
        logits,
        cut_key,
        cut_ties,
        above,
        ties,
        ranked,
        logits.stride(0),
        vocab_size,
        stats.num_blocks,
        top_k,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(stats.num_blocks),
        num_warps=8,
    )
    rank_kernel[(batch,)](
        ranked,
        stats.row_max,
        stats.normaliser,
        values,
        ids,
        top_k,
        WIDTH=max(_FEW_LOGPROBS, triton.next_power_of_2(top_k)),
    )
    return chosen, values, ids
