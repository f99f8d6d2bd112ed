"""Allocates the tensors of the KV pool, for the state that each layer keeps between steps."""

from __future__ import annotations

import math
import mmap
from dataclasses import replace

import torch
from torch import Tensor

from kernels.fp8_linear import unavailable
from kernels.kv_forms import KV_FORMS
from runtime.checkpoint.model_spec import (
    LatentState,
    LayerState,
    ModelSpec,
    NoState,
    PagedState,
    RecurrentState,
    SharedState,
)
from runtime.errors import StartupError
from runtime.executor.memory import PoolSize
from runtime.models.attention.forward_batch import KVCache
from runtime.models.layers.build_context import BuildContext


def kept_states(spec: ModelSpec, context: BuildContext) -> list[LayerState]:
    """Return the state that each layer keeps on this rank, in the cache's data type.

    A layer of another pipeline stage keeps none.
    """
    form = context.kv_cache_dtype
    own = context.stage.layers(len(spec.layer_states))
    return [
        replace(state, form=form) if isinstance(state, PagedState) else state
        for state in (s if i in own else NoState() for i, s in enumerate(spec.layer_states))
    ]


def pool_bytes_per_token(
    spec: ModelSpec, context: BuildContext, *, windowed_only: bool = False
) -> int:
    """Return the bytes that one token takes on this rank.

    With `windowed_only`, only layers with a sliding window count.
    """
    total = 0
    for state in kept_states(spec, context):
        if isinstance(state, PagedState) and (state.window is not None or not windowed_only):
            form = KV_FORMS[state.form]
            row = form.row_elements(state.head_dim) * (form.dtype or context.dtype).itemsize
            num_arrays = 1 if isinstance(state, LatentState) else 2
            total += num_arrays * state.heads_of_rank(context.tp_size) * row
    return total


def allocate_kv(size: PoolSize, spec: ModelSpec, context: BuildContext) -> list[KVCache]:
    """Allocate the KV cache: pages for attention layers, slots for recurrent layers; all zeros.

    Besides the pages in `size`, page 0 is allocated, for padding. Besides the slots, two more are
    allocated: slot 0, which stays zeros, and the last slot, for padding. A layer of latent
    attention (MLA) has one tensor that serves as keys and values.

    Args:
        size: size of the pool.
        spec: tells which state each layer keeps.
        context: data type, device and rank.

    Returns:
        One entry per layer. A layer that shares another layer's state has the same entry. A layer
        without state has empty tensors.

    Raises:
        MemoryError: there is too little memory on a CPU. On a GPU torch raises its own error.
        StartupError: the GPU does not support the cache's data type.
    """
    kv: list[KVCache] = []
    for state in kept_states(spec, context):
        if isinstance(state, SharedState):
            kv.append(kv[state.layer_idx])
            continue
        shape: tuple[int, ...] = (0,)
        dtype, is_windowed = context.dtype, False
        if isinstance(state, PagedState):
            heads, form = state.heads_of_rank(context.tp_size), KV_FORMS[state.form]
            dtype = form.dtype or dtype
            if (
                dtype is torch.float8_e4m3fn
                and context.device.type == "cuda"
                and (why := unavailable())
            ):
                raise StartupError(f"--kv-cache-dtype {state.form}: {why}; use fp8_e5m2 or auto.")
            row = form.row_elements(state.head_dim)
            is_windowed = size.num_window_pages > 0 and state.window is not None
            num_pages = size.num_window_pages if is_windowed else size.num_pages
            shape = (num_pages + 1, heads, size.page_size, row)
        k = zeros(shape, dtype, context.device)
        if isinstance(state, LatentState):
            if dtype.itemsize == 1 and context.device.type == "cuda":
                raise StartupError(
                    f"--kv-cache-dtype {state.form}: on a GPU latents are kept as auto or bf16."
                )
            kv.append(KVCache(k, k))
            continue
        v = zeros(shape, dtype, context.device)
        kv.append(KVCache(k, v, _slots(state, size.num_state_slots, context), is_windowed))
    return kv


def _slots(state: LayerState, num_slots: int, context: BuildContext) -> tuple[Tensor, ...]:
    if not isinstance(state, RecurrentState):
        return ()
    return tuple(
        zeros(
            (num_slots + 2, *part.shape_of_rank(context.tp_size)),
            torch.float32 if part.dtype == "float32" else context.dtype,
            context.device,
        )
        for part in state.parts
    )


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU in a memory map, which takes memory only where it is written.

    `torch.zeros` would write all of the memory: a pool of 10 GiB would take 10 GiB at once, and
    most of the start-up's time.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    # The map is private: a fork of this process would not see its writes.
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size_bytes} bytes cannot be mapped: {error}") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)
