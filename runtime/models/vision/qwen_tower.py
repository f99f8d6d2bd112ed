"""The common parts of Qwen2.5-VL's and Qwen3-VL's towers: patches, their positions, attention.

The patches that are merged into one vector are adjacent. Vectors are in the order of the image's
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from runtime.models.attention.backend import AttentionLayer
from runtime.models.attention.packed import attend_packed
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.linear import Linear
from runtime.models.layers.parameter import Parameter, WeightHolder, WeightShard, whole
from runtime.models.vision.qwen_config import QwenVision
from runtime.models.vision.tower import Normalize


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Context manager: torch's operations use this thread only; call our kernels outside it.

    The operations inside only move numbers, for which one core needs well under a millisecond.
    torch would split each operation among threads, and on busy cores the other thread waits for its
    turn. A tower took 275 ms for three pictures of 64 tokens, mostly waiting.
    """
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Grid = tuple[int, int]


class Patches:
    """Maps pixels to a vector for each patch, by a product that is stored as a convolution."""

    def __init__(self, vision: QwenVision, context: BuildContext, *, bias: bool) -> None:
        """Build the product, with or without a bias."""
        self._vision = vision
        self._dtype = context.dtype
        self._normalize = Normalize(vision, context)
        side, width = vision.patch_size, vision.width
        stored = (width, 3, vision.frames, side, side)
        flat = (width, 3 * vision.frames * side * side)
        self.proj = Linear(
            Parameter(flat, {"": WeightShard(stored)}, context.dtype, context.device),
            Parameter((width,), whole((width,)), context.dtype, context.device) if bias else None,
            context,
        )

    def cut(self, images: Sequence[Tensor]) -> Tensor:
        """Cut images, `[3, height, width]` uint8 each, to the input of `proj`: a row per patch."""
        return torch.cat([self._patches(image) for image in images])

    def _patches(self, pixels: Tensor) -> Tensor:
        """Return `[num_patches, 3 * frames * side * side]` of the model's dtype."""
        side, merge = self._vision.patch_size, self._vision.merge_size
        rows, columns = self.grid(pixels)
        split = self._normalize.run(pixels).view(
            3, rows // merge, merge, side, columns // merge, merge, side
        )
        patches = split.permute(1, 4, 2, 5, 0, 3, 6).to(self._dtype)
        # A still image is repeated for all frames.
        patches = patches.unsqueeze(5).expand(-1, -1, -1, -1, -1, self._vision.frames, -1, -1)
        return patches.reshape(rows * columns, -1)

    def grid(self, pixels: Tensor) -> Grid:
        """Return the rows and columns of patches of an image."""
        side = self._vision.patch_size
        return pixels.shape[1] // side, pixels.shape[2] // side


def patch_positions(grids: Sequence[Grid], merge: int, device: torch.device) -> Tensor:
    """Return the row and the column of each patch in its image, `[2, num_patches]` int64."""
    parts = []
    for rows, columns in grids:
        positions = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).T
        split = positions.view(2, rows // merge, merge, columns // merge, merge)
        parts.append(split.transpose(2, 3).reshape(2, -1))
    return torch.cat(parts, dim=1).to(device)


def rotation(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Return the cosines and sines of each patch, from its row and its column.

    Args:
        positions: `[2, num_patches]` int64, the row and the column of each patch in its image.
        head_dim: elements of a head, a multiple of 4.
        theta: base of the frequencies.

    Returns:
        `[num_patches, head_dim]` float32: cosines, then sines. In each half, the row's angles come
        first, then as many angles of the column.
    """
    frequencies = _frequencies(head_dim, theta, positions.device)
    angles = (positions.T[:, :, None].float() * frequencies).flatten(1)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@cache
def _frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    return (1.0 / theta**exponents).to(device)


@dataclass(frozen=True)
class Run:
    """The constants of one pass of the tower, which all blocks need besides the patches.

    Attributes:
        layer: heads and rotation, the same for each block. Row `i` of its table is for patch `i`.
        rows: `[num_patches]` int64, the indices of these rows.
        lengths: number of patches of each image, in order.
    """

    layer: AttentionLayer
    rows: Tensor
    lengths: list[int]


def start_run(
    vision: QwenVision, context: BuildContext, grids: Sequence[Grid], positions: Tensor
) -> Run:
    """Return the constants for one pass of the tower.

    Args:
        vision: settings of the tower.
        context: device and dtype.
        grids: rows and columns of patches of each image.
        positions: `[2, num_patches]` int64, the row and the column of each patch in its image.
    """
    heads, head_dim = vision.num_heads, vision.head_dim
    layer = AttentionLayer(
        layer_idx=0,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        cos_sin=rotation(positions, head_dim, vision.theta),
        is_rounded=context.rounds_products,
    )
    rows = torch.arange(positions.shape[1], device=positions.device)
    return Run(layer, rows, [height * width for height, width in grids])


class TowerAttention:
    """Attention of a block, in both directions. A patch attends within its part of the sequence."""

    __slots__ = ("proj", "qkv")

    def __init__(self, vision: QwenVision, context: BuildContext) -> None:
        width = vision.width
        self.qkv = Linear.replicated(width, 3 * width, True, context)
        self.proj = Linear.replicated(width, width, True, context)

    def forward(self, hidden: Tensor, run: Run, lengths: Sequence[int]) -> Tensor:
        """Compute attention and its output product.

        Args:
            hidden: `[num_patches, width]`, all patches.
            run: the constants of these patches.
            lengths: number of patches of each part of the sequence; patches attend only within
                their part.

        Returns:
            A new tensor of the shape of `hidden`.
        """
        qkv = self.qkv.apply(hidden)
        return self.proj.apply(attend_packed(run.layer, qkv, run.rows, lengths))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.qkv", self.qkv
        yield f"{prefix}.proj", self.proj
