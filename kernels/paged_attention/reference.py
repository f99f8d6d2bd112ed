"""Paged attention in plain torch: gathers a sequence's pages, then applies the textbook formula."""

import torch
from torch import Tensor

from kernels.kv_forms import numbers


def paged_attention(  # noqa: PLR0913 the op's signature
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    scale: float,
    window_left: int,
    out: Tensor | None,
    key_ends: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend sequence by sequence in float32; see `kernels.paged_attention.paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    if out is None:
        out = q.new_empty(num_tokens, num_heads * head_dim)
    page_size = k_cache.shape[2]
    bounds = qo_indptr.tolist()
    for i, kv_len in enumerate(seq_lens.tolist()):
        start, stop = bounds[i], bounds[i + 1]
        if start == stop:
            continue
        # With a window, pages that are outside every query's window may have been freed.
        first = 0 if window_left < 0 else max(0, kv_len - (stop - start) - window_left)
        first_page = first // page_size
        pages = page_table[i, first_page : -(-kv_len // page_size)].long()
        held = slice(first - first_page * page_size, kv_len - first_page * page_size)
        query = q[start:stop].transpose(0, 1).float()
        key, value = (
            numbers(cache.view(torch.uint8)[pages].view(cache.dtype))
            .transpose(0, 1)
            .reshape(cache.shape[1], -1, head_dim)[:, held]
            .repeat_interleave(num_heads // cache.shape[1], dim=0)
            for cache in (k_cache, v_cache)
        )
        query_at = torch.arange(kv_len - (stop - start), kv_len, device=q.device).unsqueeze(1)
        key_at = torch.arange(first, kv_len, device=q.device)
        ends = query_at + 1 if key_ends is None else key_ends[start:stop].unsqueeze(1)
        visible = key_at < ends
        if window_left >= 0:
            visible &= key_at >= query_at - window_left
        scores = query @ key.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(-1, stop - start, 1)
            scores = torch.cat((scores, column), dim=-1)
        attended = torch.softmax(scores, dim=-1)[..., : kv_len - first] @ value
        out[start:stop] = attended.transpose(0, 1).flatten(1).to(out.dtype)
    return out
