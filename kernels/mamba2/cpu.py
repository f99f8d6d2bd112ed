"""Mamba 2's recurrence in the C++ library; float16 uses the reference."""

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, library
from kernels.mamba2 import Mamba2Shape, reference
from kernels.state_places import StatePlaces

_mamba2 = library().hr_mamba2


def mamba2(
    xbc: Tensor, dt: Tensor, heads: Tensor, state: Tensor, places: StatePlaces, shape: Mamba2Shape
) -> Tensor:
    """Update each head's state and return the outputs; see `kernels.mamba2.mamba2`."""
    if xbc.dtype not in DTYPES:
        return reference.mamba2(xbc, dt, heads, state, places, shape)
    assert xbc.is_contiguous()
    assert dt.stride(1) == 1
    assert dt.dtype is xbc.dtype
    assert heads.is_contiguous()
    assert state.is_contiguous()
    assert state.dtype is heads.dtype is torch.float32
    width = shape.num_heads * shape.head_dim
    out = torch.empty(len(xbc), width, dtype=xbc.dtype, device=xbc.device)
    _mamba2(
        xbc.dtype is torch.bfloat16,
        xbc.data_ptr(),
        dt.data_ptr(),
        dt.stride(0),
        heads.data_ptr(),
        state.data_ptr(),
        places.qo_indptr.data_ptr(),
        places.reads.data_ptr(),
        places.save_indptr.data_ptr(),
        places.save_ends.data_ptr(),
        places.save_slots.data_ptr(),
        out.data_ptr(),
        len(places.reads),
        len(xbc),
        *shape,
        torch.get_num_threads(),
    )
    return out
