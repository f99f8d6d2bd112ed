"""Tensors of the pool, from what each layer of a model keeps between steps."""

from __future__ import annotations

import torch

from runtime.checkpoint.model_spec import ModelSpec, PagedState, SharedState
from runtime.executor.memory import PoolSize
from runtime.models.forward_batch import KVCache
from runtime.models.layers.build_context import BuildContext


def pool_bytes_per_token(spec: ModelSpec, context: BuildContext) -> int:
    """Bytes that one token takes on this rank."""
    return spec.elements_per_token(context.tp_size) * context.dtype.itemsize


def allocate_kv(size: PoolSize, spec: ModelSpec, context: BuildContext) -> list[KVCache]:
    """Allocate a pair of page arrays for each layer that keeps keys and values, zeroed.

    Args:
        size: of the pool; one page more is allocated, page 0, for padding.
        spec: says what the layers keep.
        context: type, device and rank.

    Returns:
        One entry per layer; a layer that shares another's state has that one's entry, a layer that
        keeps nothing an empty pair.
    """
    kv: list[KVCache] = []
    for state in spec.layer_states:
        if isinstance(state, SharedState):
            kv.append(kv[state.layer_idx])
            continue
        shape: tuple[int, ...] = (0,)
        if isinstance(state, PagedState):
            heads = state.heads_of_rank(context.tp_size)
            shape = (size.num_pages + 1, heads, size.page_size, state.head_dim)
        # Zeroed memory is mapped when first touched: a large pool on the CPU is free at first.
        pair = (torch.zeros(shape, dtype=context.dtype, device=context.device) for _ in range(2))
        kv.append(KVCache(*pair))
    return kv
