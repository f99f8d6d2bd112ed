"""Mamba 2's recurrence in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.mamba2 import Mamba2Shape
from kernels.state_places import StatePlaces


def mamba2(
    xbc: Tensor, dt: Tensor, heads: Tensor, state: Tensor, places: StatePlaces, shape: Mamba2Shape
) -> Tensor:
    """Update each head's state and return the outputs; see `kernels.mamba2.mamba2`."""
    log_decay, bias, skip = heads
    inputs, b, c = xbc.float().split(shape.spans, dim=1)
    inputs = inputs.unflatten(1, (shape.num_heads, shape.head_dim))
    # Repeat `B` and `C` of each group for its heads.
    b, c = (
        each.unflatten(1, (shape.num_groups, shape.state_dim)).repeat_interleave(shape.ratio, dim=1)
        for each in (b, c)
    )
    times = functional.softplus(dt.float() + bias)
    factors = torch.exp(-torch.exp(log_decay) * times)
    added = inputs * times[..., None]
    out = torch.empty_like(inputs)

    def step(matrix: Tensor, at: slice | int) -> Tensor:
        matrix = matrix * factors[at][..., None, None]
        matrix = matrix + b[at][..., None] * added[at][..., None, :]
        out[at] = (matrix * c[at][..., None]).sum(-2) + skip[:, None] * inputs[at]
        return matrix

    if places.is_decode:
        matrices = step(state.index_select(0, places.reads), slice(0, len(places.reads)))
        state.index_copy_(0, places.save_slots, matrices)
        return out.flatten(1).to(xbc.dtype)
    saves = dict(zip(places.save_ends.tolist(), places.save_slots.tolist(), strict=True))
    bounds = places.qo_indptr.tolist()
    for seq, read in enumerate(places.reads.tolist()):
        matrix = state[read]
        for at in range(bounds[seq], bounds[seq + 1]):
            matrix = step(matrix, at)
            if at + 1 in saves:
                state[saves[at + 1]] = matrix
    return out.flatten(1).to(xbc.dtype)
