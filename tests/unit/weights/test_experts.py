"""Weights of experts: loaded, replaced one by one and read back, whole or divided among ranks."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from runtime.ipc.weight_messages import RankReply, WeightPart
from runtime.models.decoder.experts_spec import ExpertsSpec, RouterSpec, StackedForm
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.experts import Experts
from runtime.weights.weight_updates import join_parts

SPEC = ExpertsSpec(
    num_experts=4,
    num_chosen=2,
    intermediate_size=8,
    layers=frozenset({0}),
    router=RouterSpec(sums_to_one=True),
)
FORMS = [
    StackedForm(is_transposed=transposed, is_interleaved=interleaved)
    for transposed in (True, False)
    for interleaved in (True, False)
]
HIDDEN = 6
NAMES = [
    *((("gate_up"), f"{expert}.{part}") for expert in range(4) for part in ("gate", "up")),
    *(("down", str(expert)) for expert in range(4)),
]


def made(
    rank: int = 0, size: int = 1, *, splits: bool = False, spec: ExpertsSpec = SPEC
) -> Experts:
    context = BuildContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        tp_rank=rank,
        tp_size=size,
        all_reduce=lambda x: x,
        splits_experts=splits,
    )
    return Experts(spec, HIDDEN, context)


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
        assert_joined(ranks, name, tensor)


def assert_joined(ranks: list[Experts], name: tuple[str, str], tensor: torch.Tensor) -> None:
    """The ranks' parts of a weight, joined, are the tensor."""
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
            shard.num_blocks,
        )
        replies.append(RankReply(0, True, data=msgspec.msgpack.encode(told)))
    joined = msgspec.msgpack.decode(join_parts(replies), type=WeightPart)
    assert joined.shape == list(tensor.shape)
    assert joined.data == tensor.numpy().tobytes()


@pytest.mark.parametrize("way", ["one rank", "parts of experts", "whole experts"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_experts_in_one_tensor_are_those_of_each(form: StackedForm, way: str) -> None:
    size, splits = 1 if way == "one rank" else 2, way == "whole experts"
    apart, each = weights(3), [made(rank, size, splits=splits) for rank in range(size)]
    gate, up = (
        torch.stack([apart["gate_up", f"{i}.{part}"] for i in range(4)]) for part in ("gate", "up")
    )
    both = torch.stack((gate, up), dim=2 if form.is_interleaved else 1).flatten(1, 2)
    down = torch.stack([apart["down", str(i)] for i in range(4)])
    tensors = {("gate_up", ""): both, ("down", ""): down}
    if form.is_transposed:
        tensors = {name: tensor.mT.contiguous() for name, tensor in tensors.items()}
    biases = {("gate_up_bias", ""): torch.randn(4, 16), ("down_bias", ""): torch.randn(4, HIDDEN)}
    spec = replace(SPEC, stacked=form, has_bias=True)
    stacked = [made(rank, size, splits=splits, spec=spec) for rank in range(size)]
    for one, other in zip(each, stacked, strict=True):
        fill(one, apart)
        for name, tensor in (tensors | biases).items():
            dict(other.parameters())[name[0]].fill(name[1], tensor)
        other.finalize([])
        for name in ("gate_up", "down"):
            assert torch.equal(one.plain(name), other.plain(name))
        # An update of one tensor keeps the other.
        dict(other.parameters())["down"].fill("", tensors["down", ""])
        other.finalize([("gate_up", ""), *biases])
        assert torch.equal(one.plain("gate_up"), other.plain("gate_up"))
    for name, tensor in (tensors | biases).items():
        assert_joined(stacked, name, tensor)
