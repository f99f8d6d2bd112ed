"""The first step of every back end: rotate queries and keys, write keys and values to pages."""

from __future__ import annotations

from torch import Tensor

from kernels.rope import RopeKernels
from runtime.models.attention.backend import AttentionLayer
from runtime.models.attention.forward_batch import ForwardBatch


def rotate_and_write(
    kernels: RopeKernels, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch
) -> Tensor:
    """Rotate `qkv` in place and fill the layer's pages.

    Args:
        kernels: the device's choice.
        layer: the layer's constants.
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`.
        batch: the step.

    Returns:
        The queries, `[num_tokens, num_heads, head_dim]`, a view of `qkv`.
    """
    num_heads, head_dim = layer.num_heads, layer.head_dim
    kv = batch.kv[layer.layer_idx]
    kernels.rope_kv_write(
        qkv,
        num_heads,
        layer.num_kv_heads,
        head_dim,
        layer.cos_sin if batch.cos_sin is None else batch.cos_sin,
        batch.positions,
        batch.slots,
        kv.k,
        kv.v,
        layer.q_norm,
        layer.k_norm,
        layer.eps,
        layer.zero_centered,
    )
    num_tokens, row = qkv.shape
    return qkv.as_strided((num_tokens, num_heads, head_dim), (row, head_dim, 1))
