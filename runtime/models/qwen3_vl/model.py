"""Qwen3-VL: a decoder and a vision tower with learned positions.

The decoder reads the outputs of several of the tower's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.embedding import Embedding
from runtime.models.layers.linear import Linear
from runtime.models.layers.norm import LayerNorm
from runtime.models.layers.parameter import WeightHolder
from runtime.models.qwen3_vl.spec import Qwen3VLSpec, Qwen3VLVision
from runtime.models.vision.model import SeeingDecoder
from runtime.models.vision.qwen_tower import (
    Grid,
    Patches,
    Run,
    TowerAttention,
    one_thread,
    patch_positions,
    start_run,
)
from runtime.models.vision.tower import Tower

_EPS = 1e-6


class Block:
    """A block of the tower: attention and a feed-forward block, each after a norm."""

    def __init__(self, vision: Qwen3VLVision, context: BuildContext) -> None:
        width, inner = vision.width, vision.intermediate_size
        self.norm1 = LayerNorm(width, _EPS, context)
        self.norm2 = LayerNorm(width, _EPS, context)
        self.attn = TowerAttention(vision, context)
        self.linear_fc1 = Linear.replicated(width, inner, True, context)
        self.linear_fc2 = Linear.replicated(inner, width, True, context)

    def forward(self, hidden: Tensor | None, stream: Tensor, run: Run) -> Tensor:
        """Compute the block; the output is not yet added to `stream`.

        Args:
            hidden: the previous block's output, which is added to `stream` in place first; `None`
                if there is none.
            stream: `[num_patches, width]`, the residual stream of all patches, changed in place.
            run: the constants of these patches.

        Returns:
            `[num_patches, width]`, the block's output.
        """
        normed = (
            self.norm1.forward(stream) if hidden is None else self.norm1.add_forward(hidden, stream)
        )
        attended = self.attn.forward(normed, run, run.lengths)
        inner = self.linear_fc1.activated(self.norm2.add_forward(attended, stream), "gelu_tanh")
        return self.linear_fc2.apply(inner)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.norm1", self.norm1
        yield f"{prefix}.norm2", self.norm2
        yield from self.attn.holders(f"{prefix}.attn")
        yield f"{prefix}.mlp.linear_fc1", self.linear_fc1
        yield f"{prefix}.mlp.linear_fc2", self.linear_fc2


class Merger:
    """Joins squares of patches to vectors of the decoder's width.

    The norm is applied to each patch, or to the joined patches (`norms_joined`).
    """

    def __init__(
        self, vision: Qwen3VLVision, hidden_size: int, context: BuildContext, *, norms_joined: bool
    ) -> None:
        merged = self._merged = vision.merged_width
        self._normed = merged if norms_joined else vision.width
        self.norm = LayerNorm(self._normed, _EPS, context)
        self.linear_fc1 = Linear.replicated(merged, merged, True, context)
        self.linear_fc2 = Linear.replicated(merged, hidden_size, True, context)

    def forward(self, stream: Tensor) -> Tensor:
        """Map `[num_patches, width]` to a new tensor `[num_vectors, hidden_size]`."""
        normed = self.norm.forward(stream.view(-1, self._normed)).view(-1, self._merged)
        return self.linear_fc2.apply(self.linear_fc1.activated(normed, "gelu"))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.norm", self.norm
        yield f"{prefix}.linear_fc1", self.linear_fc1
        yield f"{prefix}.linear_fc2", self.linear_fc2


class Qwen3VLTower(Tower):
    """The vision tower: patches with positions, blocks, and a merger per output that is read."""

    def __init__(self, spec: Qwen3VLSpec, context: BuildContext) -> None:
        """Build the layers."""
        vision, hidden = spec.vision, spec.hidden_size
        self._vision, self._context = vision, context
        self.patches = Patches(vision, context, bias=True)
        self.pos_embed = Embedding(vision.grid_side**2, vision.width, context, tied=False)
        self.blocks = [Block(vision, context) for _ in range(vision.depth)]
        self.merger = Merger(vision, hidden, context, norms_joined=False)
        self.deep_mergers = [
            Merger(vision, hidden, context, norms_joined=True) for _ in vision.deep_blocks
        ]

    def see(self, images: Sequence[Tensor]) -> list[Tensor]:
        vision, device = self._vision, self._context.device
        with one_thread(device):
            grids = [self.patches.grid(image) for image in images]
            positions = patch_positions(grids, vision.merge_size, device)
            run = start_run(vision, self._context, grids, positions)
            pixels, learned = self.patches.cut(images), self._learned(grids, positions)
        stream = self.patches.proj.apply(pixels)
        hidden: Tensor | None = learned
        deep: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            hidden = block.forward(hidden, stream, run)
            if index in vision.deep_blocks or index == vision.depth - 1:
                with one_thread(device):
                    stream.add_(hidden)
                hidden = None
            if index in vision.deep_blocks:
                deep.append(self.deep_mergers[len(deep)].forward(stream))
        vectors = [self.merger.forward(stream), *deep]
        counts = [each // vision.merge_size**2 for each in run.lengths]
        with one_thread(device):
            split = [each.split(counts) for each in vectors]
            return [torch.stack(parts) for parts in zip(*split, strict=True)]

    def _learned(self, grids: Sequence[Grid], positions: Tensor) -> Tensor:
        """Return the learned positions, `[num_patches, width]`, interpolated for each image."""
        indices, weights = stretched(grids, positions, self._vision.grid_side)
        # One corner at a time, because all four at once would take four times the memory.
        total = torch.zeros(positions.shape[1], self._vision.width, device=positions.device)
        for index, weight in zip(indices, weights, strict=True):
            total += self.pos_embed.forward(index).float() * weight[:, None]
        return total.to(self._context.dtype)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        yield f"{prefix}.patch_embed.proj", self.patches.proj
        yield f"{prefix}.pos_embed", self.pos_embed
        for index, block in enumerate(self.blocks):
            yield from block.holders(f"{prefix}.blocks.{index}")
        yield from self.merger.holders(f"{prefix}.merger")
        for index, merger in enumerate(self.deep_mergers):
            yield from merger.holders(f"{prefix}.deepstack_merger_list.{index}")


class Qwen3VL(SeeingDecoder):
    """Qwen3-VL's decoder with its vision tower."""

    def __init__(self, spec: Qwen3VLSpec, context: BuildContext) -> None:
        super().__init__(spec, context, Qwen3VLTower(spec, context))


def stretched(grids: Sequence[Grid], positions: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return the points and weights with which a square grid is interpolated for each patch.

    The interpolation is bilinear. The corners of the grid lie on the corners of the image.

    Args:
        grids: rows and columns of patches of each image.
        positions: `[2, num_patches]` int64, row and column of each patch.
        side: number of points along a side of the grid.

    Returns:
        For each patch the four points of the grid around it: the points' indices, `[4,
        num_patches]` int64, and their weights, `[4, num_patches]` float32.
    """
    device = positions.device
    counts = torch.tensor([rows * columns for rows, columns in grids])
    sizes = torch.tensor(grids).T.repeat_interleave(counts, dim=1).to(device)
    at = positions.float() * (side - 1) / (sizes - 1).clamp(min=1)
    low = at.long()
    high = (low + 1).clamp(max=side - 1)
    share = at - low
    (top, left), (bottom, right) = low, high
    (down, across) = share
    indices = [top * side + left, top * side + right, bottom * side + left, bottom * side + right]
    weights = [
        (1 - down) * (1 - across),
        (1 - down) * across,
        down * (1 - across),
        down * across,
    ]
    return torch.stack(indices), torch.stack(weights)
