"""Weights of a convolution: ranks take a part of each span, and reading one joins the parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from runtime.ipc.weight_messages import RankReply, ReadWeight, WeightPart
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.channel_weights import conv_holder
from runtime.weights.live_weights import LiveWeights
from runtime.weights.rank_weights import RankWeights
from runtime.weights.weight_updates import join_parts

SPANS = [4, 4, 8]
NAME = "model.layers.0.conv.weight"


def read(
    rank: int, size: int, tensor: torch.Tensor, num_rows: int, num_parts: tuple[int, ...]
) -> RankReply:
    """The answer of a rank to which the whole tensor was loaded."""
    context = BuildContext(
        dtype=torch.float32, device=torch.device("cpu"), tp_rank=rank, tp_size=size
    )
    holder = conv_holder(SPANS, 3, context, num_parts=num_parts)
    dict(holder.parameters())["weight"].fill("", tensor)
    weight = SimpleNamespace(name=NAME, target="conv.weight", shard="", shape=tuple(tensor.shape))
    spec = SimpleNamespace(
        aliases={}, canonical=str, weights=[weight], weights_in_floats={}, quantization=None
    )
    model: Any = SimpleNamespace(
        spec=spec, context=context, holders=lambda: iter([("conv", holder)])
    )
    weights = LiveWeights(model, None, lambda: None, None)  # type: ignore[arg-type]  # not spilt
    memory: Any = SimpleNamespace(forget_recordings=lambda: None)
    worker = RankWeights(rank, context.device, weights, memory, lambda: None)
    return worker.run(ReadWeight(NAME, num_rows))


@pytest.mark.parametrize("num_parts", [(), (4, 1, 2)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("num_rows", [5, 16, 100])
def test_the_parts_of_each_span_are_joined(
    size: int, num_rows: int, num_parts: tuple[int, ...]
) -> None:
    """Ranks have copies of a span that cannot be cut into as many parts."""
    tensor = torch.randn(sum(SPANS), 1, 3)
    replies = [read(rank, size, tensor, num_rows, num_parts) for rank in range(size)]
    joined = msgspec.msgpack.decode(join_parts(replies), type=WeightPart)
    assert joined.shape == list(tensor[:num_rows].shape)
    assert joined.data == tensor[:num_rows].numpy().tobytes()
