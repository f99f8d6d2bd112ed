"""The gated delta rule in the C++ library; float16 uses the reference."""

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, library
from kernels.gated_delta import DeltaShape, reference
from kernels.state_places import StatePlaces

_gated_delta = library().hr_gated_delta


def gated_delta(
    qkv: Tensor,
    gates: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    places: StatePlaces,
    shape: DeltaShape,
) -> Tensor:
    """Update each head's state and return outputs; see `kernels.gated_delta.gated_delta`."""
    if qkv.dtype not in DTYPES:
        return reference.gated_delta(qkv, gates, decay, dt_bias, state, places, shape)
    assert qkv.is_contiguous()
    assert gates.stride(1) == 1
    assert gates.dtype is qkv.dtype
    assert state.is_contiguous()
    assert state.dtype is decay.dtype is dt_bias.dtype is torch.float32
    out = torch.empty(
        len(qkv), shape.num_value_heads * shape.value_dim, dtype=qkv.dtype, device=qkv.device
    )
    _gated_delta(
        qkv.dtype is torch.bfloat16,
        qkv.data_ptr(),
        gates.data_ptr(),
        gates.stride(0),
        decay.data_ptr(),
        dt_bias.data_ptr(),
        state.data_ptr(),
        places.qo_indptr.data_ptr(),
        places.reads.data_ptr(),
        places.save_indptr.data_ptr(),
        places.save_ends.data_ptr(),
        places.save_slots.data_ptr(),
        out.data_ptr(),
        len(places.reads),
        len(qkv),
        shape.num_key_heads,
        shape.ratio,
        shape.key_dim,
        shape.value_dim,
        shape.gate_span,
        torch.get_num_threads(),
    )
    return out
