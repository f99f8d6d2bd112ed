"""The work that all back ends share: rotate heads, write pages, cut values from the result."""

from __future__ import annotations

from torch import Tensor

from kernels.latent_attention import latent_attention
from kernels.norm import rms_norm
from kernels.rope import RopeKernels
from runtime.models.attention.backend import AttentionLayer
from runtime.models.attention.forward_batch import ForwardBatch


def rotate_and_write(
    kernels: RopeKernels, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch
) -> Tensor:
    """Norm and rotate the heads of `qkv` in place, and write keys and values to the layer's pages.

    Args:
        kernels: the implementation that was chosen for the device.
        layer: the layer's constants.
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`.
        batch: the step.

    Returns:
        The queries, `[num_tokens, num_heads, head_dim]`, a view of `qkv`.
    """
    num_heads, head_dim = layer.num_heads, layer.head_dim
    kv = batch.kv[layer.layer_idx]
    num_tokens, row = qkv.shape
    q = qkv.as_strided((num_tokens, num_heads, head_dim), (row, head_dim, 1))
    if layer.cos_sin is None or layer.interleaved or layer.cos_sin.shape[1] < head_dim:
        _turn_and_write(kernels, layer, qkv, batch)
        return q
    kernels.rope_kv_write(
        qkv,
        num_heads,
        layer.num_kv_heads,
        head_dim,
        layer.cos_sin if batch.cos_sin is None else batch.cos_sin,
        batch.positions,
        batch.slots_of(layer.layer_idx),
        kv.k,
        kv.v,
        layer.q_norm,
        layer.k_norm,
        layer.eps,
        layer.zero_centered,
    )
    return q


def _turn_and_write(
    kernels: RopeKernels, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch
) -> None:
    """Do the work of `rotate_and_write` for layers that the fused kernel does not support.

    These are layers without rotation, layers that rotate only the first elements of each head, and
    layers that rotate neighboring elements together.
    """
    heads = qkv.unflatten(1, (-1, layer.head_dim))
    q, k, v = heads.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
    for each, weight in ((q, layer.q_norm), (k, layer.k_norm)):
        if weight is not None:
            # With a single head, `reshape` returns a view with strides, which the norm does not
            # take.
            flat = each.reshape(-1, layer.head_dim).contiguous()
            normed = rms_norm(flat, weight, layer.eps, layer.zero_centered)
            each.copy_(normed.view(each.shape))
    if layer.cos_sin is not None:
        cos_sin = layer.cos_sin.index_select(0, batch.positions).unsqueeze(1)
        for each in (q, k):
            turn(each, cos_sin, interleaved=layer.interleaved)
    write_heads(kernels, layer, k, v, batch)


def turn(part: Tensor, cos_sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first elements of each head, as many as `cos_sin` has columns, in place.

    Args:
        part: `[num_tokens, heads, head_dim]`.
        cos_sin: `[num_tokens, 1, rotary_dim]` float32, cosines then sines.
        interleaved: whether neighboring elements form a pair; see `RopeConfig`.

    Returns:
        `part`.
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    rotated = part[..., : cos_sin.shape[-1]]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    x, y = first.float(), second.float()
    turned = x * cos - y * sin, y * cos + x * sin
    first.copy_(turned[0])
    second.copy_(turned[1])
    return part


def write_heads(
    kernels: RopeKernels, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch
) -> None:
    """Write a step's keys and values to the layer's pages; see `AttentionBackend.write`."""
    kv = batch.kv[layer.layer_idx]
    kernels.kv_write(k, v, batch.slots_of(layer.layer_idx), kv.k, kv.v)


def values_of(layer: AttentionLayer, out: Tensor) -> Tensor:
    """Return the part of each head of `out` that values fill: its first `value_dim` elements.

    Args:
        layer: the layer's constants.
        out: `[num_tokens, num_heads * head_dim]`, the result of attention.

    Returns:
        `[num_tokens, num_heads * value_dim]`: `out` itself if values are as wide as keys.
    """
    if layer.value_dim in (0, layer.head_dim):
        return out
    return out.unflatten(1, (layer.num_heads, -1))[:, :, : layer.value_dim].flatten(1)


def attend_latents(
    layer: AttentionLayer, q: Tensor, batch: ForwardBatch, *, invariant: bool
) -> Tensor:
    """Compute attention over latents (MLA) with the device's kernel; see `AttentionBackend.attend`.

    Args:
        layer: the layer's constants.
        q: queries in the space of the latents, `[num_tokens, num_heads, head_dim]`.
        batch: the step.
        invariant: whether the bits of a result must not depend on the rest of the batch.
    """
    return latent_attention(
        q,
        batch.kv[layer.layer_idx].k,
        batch.page_table,
        batch.seq_lens,
        batch.qo_indptr,
        batch.num_decodes,
        layer.scale,
        layer.value_dim,
        invariant,
    )
