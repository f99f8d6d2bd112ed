"""A decoder whose prompts may hold images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.decoder.model import DecoderForCausalLM
from runtime.models.decoder.spec import DecoderSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import WeightHolder
from runtime.models.vision.tower import Tower


class SeeingDecoder(DecoderForCausalLM):
    """A text decoder with a vision tower.

    Attributes:
        visual: the vision tower.
    """

    visual: Tower

    def __init__(self, spec: DecoderSpec, context: BuildContext, tower: Tower) -> None:
        """Build the decoder around `tower`."""
        super().__init__(spec, context)
        self.visual = tower
        self._axes = torch.tensor(spec.rope_axes, dtype=torch.int64, device=context.device)

    def forward(self, batch: ForwardBatch) -> Tensor:
        if batch.rope_axes is not None:
            tables = (layer.self_attn.cos_sin for layer in self.model.layers)
            table = next(each for each in tables if each is not None)
            batch.cos_sin = turned_by_axes(table, batch.rope_axes, self._axes)
            batch.positions = torch.arange(len(batch.positions), device=table.device)
        return super().forward(batch)

    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        yield from super().holders()
        yield from self.visual.holders("visual")


def turned_by_axes(table: Tensor, positions: Tensor, axes: Tensor) -> Tensor:
    """Return the cosines and sines of each token of a step whose positions have three axes.

    Args:
        table: `[max_positions, head_dim]` float32, the rotary table of tokens with one position:
            cosines in one half, sines in the other.
        positions: `[3, num_tokens]` int64.
        axes: `[head_dim / 2]` int64, for each rotation angle the axis whose position it uses.

    Returns:
        `[num_tokens, head_dim]` float32, a new tensor.
    """
    rows = positions.index_select(0, axes).T
    return torch.cat([half.gather(0, rows) for half in table.chunk(2, dim=1)], dim=1)
