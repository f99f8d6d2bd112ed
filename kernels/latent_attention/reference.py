"""Latent attention in plain torch; attention itself uses the reference over pages."""

import torch
from torch import Tensor

from kernels.norm.reference import rms_norm
from kernels.paged_attention import reference
from kernels.rope import ROPE


def rotate_and_keep(  # noqa: PLR0913 the op's signature
    q_rope: Tensor,
    kv: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    q: Tensor,
) -> None:
    """Write normed and rotated latents; see `kernels.latent_attention.rotate_and_keep`."""
    rank = len(norm)
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    rows = torch.empty_like(kv, memory_format=torch.contiguous_format)
    rows[:, :rank] = rms_norm(kv[:, :rank], norm, eps)
    rows[:, rank:] = _rotated(kv[:, rank:], cos, sin, interleaved)
    q[:, :, rank:] = _rotated(q_rope, cos.unsqueeze(1), sin.unsqueeze(1), interleaved)
    row = rows.unsqueeze(1)
    # Keys and values have the same pages, so the second write repeats the first.
    ROPE.choose(kv.device.type).kernels.kv_write(row, row, slots, cache, cache)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    x = x.float()
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def latent_attention(  # noqa: PLR0913 the op's signature
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    num_decodes: int | None,  # noqa: ARG001  # for others
    scale: float,
    rank: int,
    invariant: bool = False,  # noqa: ARG001  # always
) -> Tensor:
    """Attend to cached latents; see `kernels.latent_attention.latent_attention`."""
    out = reference.paged_attention(
        q, cache, cache, page_table, seq_lens, qo_indptr, scale, -1, None
    )
    return out.view(q.shape)[:, :, :rank].flatten(1)
