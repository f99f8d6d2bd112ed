"""Sampling in plain torch.

The whole vocabulary is sorted only for rows whose filters need it. A top-k row uses its `top_k`
best tokens, and a top-p row its 1,024 best. Only if these have less than `top_p` of the mass is the
whole row sorted. All paths add the same numbers in the same order, so a row draws the same token on
each path.
"""

import torch
from torch import Tensor

from kernels.greedy.reference import greedy_tokens
from kernels.sampling.candidates import top_candidates
from kernels.sampling.draw import draw, uniform
from kernels.sampling.penalties import (
    apply_logit_bias,
    apply_penalties,
    apply_token_bitmask,
    mask_tokens,
)
from kernels.sampling.rows import SamplingRows

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

_TOP_P_CANDIDATES = 1024
_LOGPROB_FLOOR = -1e9


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Choose one token per row; see `kernels.sampling.sample`."""
    if rows.all_greedy or logits.shape[0] == 0:
        return logits.argmax(-1)
    sampled = (rows.temperature > 0).nonzero().squeeze(1)
    if not sampled.numel():
        return logits.argmax(-1)
    drawn = _sample_rows(logits[sampled], rows, sampled).clamp(0, logits.shape[1] - 1)
    if len(drawn) == len(logits):
        return drawn
    return logits.argmax(-1).index_copy(0, sampled, drawn)


def _sample_rows(logits: Tensor, rows: SamplingRows, index: Tensor) -> Tensor:
    """Draw tokens for the rows `index`; `logits` has only these rows and may be overwritten."""
    scaled = logits.div_(rows.temperature[index].unsqueeze(1))
    probs = torch.softmax(scaled, dim=-1)
    uniforms = uniform(rows.seed[index], rows.position[index])
    vocab_size = logits.shape[1]
    top_k = rows.top_k[index].long()
    top_k = torch.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
    top_p = rows.top_p[index]
    min_p = rows.min_p[index]

    limited_k = top_k < vocab_size
    ranked = limited_k | (top_p < 1.0)
    plain = (~ranked).nonzero().squeeze(1)
    if len(plain) == len(index):
        return _draw_unranked(probs, min_p, uniforms)
    tokens = torch.empty_like(index)
    tokens[plain] = _draw_unranked(probs[plain], min_p[plain], uniforms[plain])

    left = ranked.nonzero().squeeze(1)
    count = max(
        rows.max_top_k if rows.any_top_k else 0,
        _TOP_P_CANDIDATES if bool((ranked & ~limited_k).any()) else 0,
    )
    for width in (count, vocab_size):
        if not left.numel():
            break
        _, ids = top_candidates(scaled[left], width)
        candidates = probs[left].gather(1, ids)
        kept, complete = _filter(candidates, top_k[left], top_p[left], min_p[left], vocab_size)
        tokens[left] = _draw_candidates(candidates * kept, ids, uniforms[left])
        left = left[~complete]
    return tokens


def _draw_unranked(probs: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    floor = min_p.unsqueeze(1) * probs.amax(-1, keepdim=True)
    return draw(probs.masked_fill(probs < floor, 0.0), uniforms)


def _filter(
    candidates: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Apply the filters to probabilities in descending order.

    Args:
        candidates: `[batch, count]` float32, the largest probabilities of each row, descending.
        top_k: `[batch]` int64 in `[1, vocab_size]`.
        top_p: `[batch]` float32.
        min_p: `[batch]` float32.
        vocab_size: size of the vocabulary; with `count` equal to it, rows are complete.

    Returns:
        `[batch, count]` bool, whether each token stays; and `[batch]` bool, whether all tokens that
        stay are certainly among the candidates.
    """
    count = candidates.shape[1]
    rank = torch.arange(count, device=candidates.device)
    running = candidates.cumsum(-1)
    before = torch.nn.functional.pad(running, (1, 0))[:, :count]
    top_p, min_p = top_p.unsqueeze(1), min_p.unsqueeze(1)
    # With min-p, top-p applies to the renormalised probabilities of the tokens that top-k kept.
    last = top_k.clamp(max=count).unsqueeze(1) - 1
    limited_k = (top_k < vocab_size).unsqueeze(1)
    mass = torch.where((min_p > 0) & limited_k, running.gather(1, last), 1.0)
    threshold = torch.where(top_p < 1.0, top_p * mass, float("inf"))
    kept = (rank < top_k.unsqueeze(1)) & (before < threshold)
    kept &= candidates >= min_p * candidates[:, :1]
    kept[:, 0] = True
    enough = (top_k <= count) | (running[:, -1:] >= threshold).squeeze(1) | (count == vocab_size)
    return kept, enough


def _draw_candidates(weights: Tensor, ids: Tensor, uniforms: Tensor) -> Tensor:
    ids, order = ids.sort(dim=-1)
    chosen = draw(weights.gather(1, order), uniforms).clamp(max=ids.shape[1] - 1)
    return ids.gather(1, chosen.unsqueeze(1)).squeeze(1)


def gather_logprobs(logits: Tensor, token_ids: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of tokens; see `kernels.sampling.gather_logprobs`."""
    logprobs = torch.log_softmax(logits, dim=-1).clamp_(min=_LOGPROB_FLOOR)
    chosen = logprobs.gather(1, token_ids)
    if top_k == 0 or logits.shape[0] == 0:
        shape = (logits.shape[0], min(top_k, logits.shape[1]))
        return chosen, logprobs.new_empty(shape), token_ids.new_empty(shape)
    values, ids = top_candidates(logprobs, min(top_k, logits.shape[1]))
    return chosen, values, ids


def best_tokens(
    logits: Tensor, bitmask: Tensor | None = None, row_index: Tensor | None = None
) -> Tensor:
    """Return the token of each row's largest logit; see `kernels.sampling.best_tokens`."""
    if bitmask is not None:
        apply_token_bitmask(logits, bitmask, row_index)
    return greedy_tokens(logits, logits)


def nan_rows(logits: Tensor) -> Tensor:
    """Return whether each row has a NaN; see `kernels.sampling.nan_rows`."""
    # The maximum propagates a NaN, so a [batch, vocab_size] mask is not needed.
    return logits.amax(-1).isnan()
