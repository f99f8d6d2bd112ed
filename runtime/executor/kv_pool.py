"""The pool's tensors, from what each layer of a model keeps between steps."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from runtime.checkpoint.model_spec import ModelSpec, PagedState, SharedState
from runtime.executor.memory import PoolSize
from runtime.models.attention.forward_batch import KVCache
from runtime.models.layers.build_context import BuildContext


def pool_bytes_per_token(spec: ModelSpec, context: BuildContext) -> int:
    """Bytes that one token takes on this rank."""
    return spec.elements_per_token(context.tp_size) * context.dtype.itemsize


def allocate_kv(size: PoolSize, spec: ModelSpec, context: BuildContext) -> list[KVCache]:
    """Allocate a pair of page arrays for each layer that keeps keys and values, zeroed.

    Args:
        size: of the pool; one more page is allocated, page 0, for padding.
        spec: what the layers keep.
        context: type, device and rank.

    Returns:
        One entry per layer; a layer that shares another's state has that one's entry, a layer that
        keeps nothing an empty pair.

    Raises:
        MemoryError: there is no room for it on a CPU; on a GPU torch raises its own error.
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
        kv.append(KVCache(*(_zeros(shape, context.dtype, context.device) for _ in range(2))))
    return kv


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU a map, whose pages take memory once a token is written to them.

    `torch.zeros` writes them all: a pool of 10 GiB took 10 GiB, and most of a start.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private: a fork of this process would not share what it writes.
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size_bytes} bytes cannot be mapped: {error}") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)
