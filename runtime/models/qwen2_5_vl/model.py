"""Qwen2.5-VL: a decoder and a vision tower.

In most blocks of the tower, patches attend only within squares of the image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.linear import Linear, Output
from runtime.models.layers.norm import RMSNorm
from runtime.models.layers.parameter import WeightHolder
from runtime.models.qwen2_5_vl.spec import Qwen2_5_VLSpec, Qwen2_5_VLVision
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
    """A block of the tower: attention and a gated feed-forward block, each after a norm."""

    def __init__(self, vision: Qwen2_5_VLVision, context: BuildContext) -> None:
        width, inner = vision.width, vision.intermediate_size
        self.norm1 = RMSNorm(width, _EPS, context)
        self.norm2 = RMSNorm(width, _EPS, context)
        self.attn = TowerAttention(vision, context)
        # Every rank has the whole block, as it has the whole attention.
        halves = [Output(shard, inner, 0, inner) for shard in ("gate", "up")]
        self.gate_up_proj = Linear.column_parallel(width, halves, True, context)
        self.down_proj = Linear.replicated(inner, width, True, context)

    def forward(
        self, hidden: Tensor | None, stream: Tensor, run: Run, lengths: Sequence[int]
    ) -> Tensor:
        """Compute the block; the output is not yet added to `stream`.

        Args:
            hidden: the previous block's output, which is added to `stream` in place first; `None`
                if there is none.
            stream: `[num_patches, width]`, the residual stream of all patches, changed in place.
            run: the constants of these patches.
            lengths: number of patches of each part of the sequence; patches attend only within
                their part.

        Returns:
            `[num_patches, width]`, the block's output.
        """
        normed = (
            self.norm1.forward(stream) if hidden is None else self.norm1.add_forward(hidden, stream)
        )
        attended = self.attn.forward(normed, run, lengths)
        inner = self.gate_up_proj.gated(self.norm2.add_forward(attended, stream), "silu")
        return self.down_proj.apply(inner)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.norm1", self.norm1
        yield f"{prefix}.norm2", self.norm2
        yield from self.attn.holders(f"{prefix}.attn")
        yield f"{prefix}.mlp.gate_up_proj", self.gate_up_proj
        yield f"{prefix}.mlp.down_proj", self.down_proj


class Qwen2_5_VLTower(Tower):
    """The vision tower: patches, blocks, and layers that join patches to the decoder's vectors."""

    def __init__(self, spec: Qwen2_5_VLSpec, context: BuildContext) -> None:
        """Build the layers."""
        vision = self._vision = spec.vision
        self._context = context
        self.patches = Patches(vision, context, bias=False)
        self.blocks = [Block(vision, context) for _ in range(vision.depth)]
        self.norm = RMSNorm(vision.width, _EPS, context)
        merged = vision.merged_width
        self.inner = Linear.replicated(merged, merged, True, context)
        self.outer = Linear.replicated(merged, spec.hidden_size, True, context)

    def see(self, images: Sequence[Tensor]) -> list[Tensor]:
        vision, device = self._vision, self._context.device
        with one_thread(device):
            grids = [self.patches.grid(image) for image in images]
            joined = vision.merge_size**2
            order, windows = windowed(grids, vision.merge_size, vision.window)
            order = order.to(device)
            patches = (order[:, None] * joined + torch.arange(joined, device=device)).flatten()
            positions = patch_positions(grids, vision.merge_size, device).index_select(1, patches)
            run = start_run(vision, self._context, grids, positions)
            pixels = self.patches.cut(images).index_select(0, patches)
        of_windows = [count * joined for count in windows]
        stream = self.patches.proj.apply(pixels)
        hidden: Tensor | None = None
        for index, block in enumerate(self.blocks):
            lengths = run.lengths if index in vision.full_blocks else of_windows
            hidden = block.forward(hidden, stream, run, lengths)
        assert hidden is not None, "a tower has blocks"
        normed = self.norm.add_forward(hidden, stream).view(-1, vision.merged_width)
        vectors = self.outer.apply(self.inner.activated(normed, "gelu"))
        with one_thread(device):
            # Restores the order of rows and columns of the image.
            vectors = torch.empty_like(vectors).index_copy_(0, order, vectors)
            counts = [each // joined for each in run.lengths]
            return [part.clone()[None] for part in vectors.split(counts)]

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        yield f"{prefix}.patch_embed.proj", self.patches.proj
        for index, block in enumerate(self.blocks):
            yield from block.holders(f"{prefix}.blocks.{index}")
        yield f"{prefix}.merger.ln_q", self.norm
        yield f"{prefix}.merger.mlp.0", self.inner
        yield f"{prefix}.merger.mlp.2", self.outer


class Qwen2_5_VL(SeeingDecoder):
    """Qwen2.5-VL's decoder with its vision tower."""

    def __init__(self, spec: Qwen2_5_VLSpec, context: BuildContext) -> None:
        super().__init__(spec, context, Qwen2_5_VLTower(spec, context))


def windowed(grids: Sequence[Grid], merge: int, window: int) -> tuple[Tensor, list[int]]:
    """Return an order of the images' vectors in which each attention square is contiguous.

    Args:
        grids: rows and columns of patches of each image.
        merge: side, in patches, of the square that becomes one vector.
        window: side, in vectors, of a square within which most blocks attend.

    Returns:
        `[num_vectors]` int64 on the CPU, the index of the vector at each place of the new order;
        and the number of vectors of each square, in order.
    """
    parts: list[Tensor] = []
    counts: list[int] = []
    first = 0
    for patch_rows, patch_columns in grids:
        rows, columns = patch_rows // merge, patch_columns // merge
        indices = torch.arange(first, first + rows * columns).view(rows, columns)
        for band in indices.split(window):
            squares = band.split(window, dim=1)
            parts += [square.flatten() for square in squares]
            counts += [square.numel() for square in squares]
        first += rows * columns
    return torch.cat(parts), counts
