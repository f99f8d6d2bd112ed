"""Weights of experts: loaded, replaced one by one and read back, whole or divided among ranks."""

from __future__ import annotations

import msgspec
import pytest
import torch

from runtime.ipc.weight_messages import RankReply, WeightPart
from runtime.models.decoder.experts_spec import ExpertsSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.experts import Experts
from runtime.weights.weight_updates import join_parts

SPEC = ExpertsSpec(
    num_experts=4,
    num_chosen=2,
    intermediate_size=8,
    layers=frozenset({0}),
    sums_to_one=True,
)
HIDDEN = 6
NAMES = [
    *((("gate_up"), f"{expert}.{part}") for expert in range(4) for part in ("gate", "up")),
    *(("down", str(expert)) for expert in range(4)),
]


def made(rank: int = 0, size: int = 1, *, splits: bool = False) -> Experts:
    context = BuildContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        tp_rank=rank,
        tp_size=size,
        all_reduce=lambda x: x,
        splits_experts=splits,
    )
    return Experts(SPEC, HIDDEN, context)


def weights(seed: int) -> dict[tuple[str, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_up": (8, HIDDEN), "down": (HIDDEN, 8)}
    return {name: torch.randn(shapes[name[0]], generator=generator) for name in NAMES}


def fill(experts: Experts, tensors: dict[tuple[str, str], torch.Tensor]) -> None:
    parameters = dict(experts.parameters())
    for (parameter, shard), tensor in tensors.items():
        parameters[parameter].fill(shard, tensor)
    experts.finalize([name for name in NAMES if name not in tensors])


@pytest.mark.parametrize("name", NAMES)
def test_one_tensor_is_replaced_and_the_others_stay(name: tuple[str, str]) -> None:
    experts, before, new = made(), weights(0), weights(1)[name]
    fill(experts, before)
    fill(experts, {name: new})
    for each, tensor in before.items():
        assert torch.equal(experts.part(*each), new if each == name else tensor)


@pytest.mark.parametrize("splits", [True, False])
def test_ranks_together_hold_every_tensor(splits: bool) -> None:
    tensors = weights(2)
    ranks = [made(rank, 2, splits=splits) for rank in range(2)]
    for rank in ranks:
        fill(rank, tensors)
    for name, tensor in tensors.items():
        replies = []
        for rank in ranks:
            part, shard = rank.part(*name), dict(rank.parameters())[name[0]].shards[name[1]]
            whole_len = 0 if shard.shard_dim is None else shard.shape[shard.shard_dim]
            told = WeightPart(
                list(part.shape),
                shard.shard_dim,
                shard.start,
                whole_len,
                part.contiguous().numpy().tobytes(),
            )
            replies.append(RankReply(0, True, data=msgspec.msgpack.encode(told)))
        joined = msgspec.msgpack.decode(join_parts(replies), type=WeightPart)
        assert joined.shape == list(tensor.shape)
        assert joined.data == tensor.numpy().tobytes()
