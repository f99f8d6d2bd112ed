"""The gated delta rule in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gated_delta import DeltaShape
from kernels.state_places import StatePlaces

_EPS = 1e-6


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
    queries, keys, values = split_heads(qkv, shape)
    factors, strengths = token_gates(gates, decay, dt_bias, shape)
    out = torch.empty_like(values)

    def step(matrix: Tensor, at: slice | int) -> Tensor:
        matrix = matrix * factors[at][..., None, None]
        key = keys[at][..., None]
        seen = (matrix * key).sum(-2)
        change = (values[at] - seen) * strengths[at][..., None]
        matrix = matrix + key * change[..., None, :]
        out[at] = (matrix * queries[at][..., None]).sum(-2)
        return matrix

    if places.is_decode:
        everything = slice(0, len(places.reads))
        matrices = step(state.index_select(0, places.reads), everything)
        state.index_copy_(0, places.save_slots, matrices)
        return out.flatten(1).to(qkv.dtype)
    saves = dict(zip(places.save_ends.tolist(), places.save_slots.tolist(), strict=True))
    bounds = places.qo_indptr.tolist()
    for seq, read in enumerate(places.reads.tolist()):
        matrix = state[read]
        for at in range(bounds[seq], bounds[seq + 1]):
            matrix = step(matrix, at)
            if at + 1 in saves:
                state[saves[at + 1]] = matrix
    return out.flatten(1).to(qkv.dtype)


def split_heads(qkv: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of each value head.

    Queries and keys have unit length, and queries are then scaled. Each result is `[num_tokens,
    num_value_heads, size]` float32.
    """
    keys = shape.num_key_heads * shape.key_dim
    query, key, value = qkv.float().split([keys, keys, qkv.shape[1] - 2 * keys], dim=1)

    def unit(part: Tensor) -> Tensor:
        heads = part.unflatten(1, (shape.num_key_heads, shape.key_dim))
        norm = torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPS)
        return (heads * norm).repeat_interleave(shape.ratio, dim=1)

    scaled = unit(query) * shape.key_dim**-0.5
    return scaled, unit(key), value.unflatten(1, (shape.num_value_heads, shape.value_dim))


def token_gates(
    gates: Tensor, decay: Tensor, dt_bias: Tensor, shape: DeltaShape
) -> tuple[Tensor, Tensor]:
    """Return each token's decay and rate.

    The decay is a factor of the head's matrix. The rate is a factor of the change that the token
    makes. Both are `[num_tokens, num_value_heads]` float32.
    """
    of_heads = gates.float().unflatten(1, (-1, 2, shape.gate_span))
    strength = torch.sigmoid(of_heads[:, :, 0]).flatten(1)
    time = functional.softplus(of_heads[:, :, 1].flatten(1) + dt_bias)
    return torch.exp(decay * time), strength
