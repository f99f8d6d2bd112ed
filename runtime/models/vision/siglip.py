"""SigLIP's vision tower: all patches of a square image attend to one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.encoder_attention import encoder_attention
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.embedding import Embedding
from runtime.models.layers.linear import Linear, Output
from runtime.models.layers.norm import LayerNorm
from runtime.models.layers.parameter import Parameter, WeightHolder, WeightShard, whole
from runtime.models.vision.siglip_config import SiglipVision
from runtime.models.vision.tower import Normalize


class SiglipBlock:
    """A block of the tower: attention and a feed-forward part, each after a norm."""

    __slots__ = (
        "_head_dim",
        "_is_rounded",
        "_num_heads",
        "fc1",
        "fc2",
        "layer_norm1",
        "layer_norm2",
        "out_proj",
        "qkv_proj",
    )

    def __init__(self, vision: SiglipVision, context: BuildContext) -> None:
        width, inner, eps = vision.width, vision.intermediate_size, vision.layer_norm_eps
        self._num_heads, self._head_dim = vision.num_heads, width // vision.num_heads
        self._is_rounded = context.rounds_products
        self.layer_norm1 = LayerNorm(width, eps, context)
        parts = [Output(shard, width, 0, width) for shard in "qkv"]
        self.qkv_proj = Linear.column_parallel(width, parts, True, context)
        self.out_proj = Linear.replicated(width, width, True, context)
        self.layer_norm2 = LayerNorm(width, eps, context)
        self.fc1 = Linear.replicated(width, inner, True, context)
        self.fc2 = Linear.replicated(inner, width, True, context)

    def attend(self, normed: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute the attention of the block.

        Args:
            normed: `[num_patches, width]`, patches of all images.
            lengths: number of patches of each image.

        Returns:
            A new tensor of the shape of `normed`.
        """
        heads = self._num_heads
        attended = encoder_attention(
            self.qkv_proj.apply(normed),
            lengths,
            heads,
            heads,
            self._head_dim**-0.5,
            is_rounded=self._is_rounded,
        )
        return self.out_proj.apply(attended)

    def feed(self, normed: Tensor) -> Tensor:
        """Compute the feed-forward part: `[num_patches, width]` to a new tensor of that shape."""
        return self.fc2.apply(self.fc1.activated(normed, "gelu_tanh"))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.layer_norm1", self.layer_norm1
        yield f"{prefix}.self_attn.qkv_proj", self.qkv_proj
        yield f"{prefix}.self_attn.out_proj", self.out_proj
        yield f"{prefix}.layer_norm2", self.layer_norm2
        yield f"{prefix}.mlp.fc1", self.fc1
        yield f"{prefix}.mlp.fc2", self.fc2


class Siglip:
    """The tower: patches with learned positions, the blocks, and the last norm."""

    def __init__(self, vision: SiglipVision, context: BuildContext) -> None:
        self._vision, self._dtype = vision, context.dtype
        self._normalize = Normalize(vision, context)
        side, width = vision.patch_size, vision.width
        flat, stored = (width, 3 * side * side), (width, 3, side, side)
        self.patch_embedding = Linear(
            Parameter(flat, {"": WeightShard(stored)}, context.dtype, context.device),
            Parameter((width,), whole((width,)), context.dtype, context.device),
            context,
        )
        self.position_embedding = Embedding(vision.patches_per_side**2, width, context, tied=False)
        self.blocks = [SiglipBlock(vision, context) for _ in range(vision.depth)]
        self.post_layernorm = LayerNorm(width, vision.layer_norm_eps, context)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Compute the vectors of the images' patches, row by row.

        Args:
            images: `[3, side, side]` uint8 each.

        Returns:
            A new tensor `[num_images, num_patches, width]`.
        """
        patches = torch.cat([self._patches(image) for image in images])
        residual = self.patch_embedding.apply(patches)
        embedding = self.position_embedding.weight
        residual.view(len(images), *embedding.shape).add_(embedding)
        lengths = [len(embedding)] * len(images)
        hidden: Tensor | None = None
        for block in self.blocks:
            normed = _add_normed(hidden, residual, block.layer_norm1)
            normed = block.layer_norm2.add_forward(block.attend(normed, lengths), residual)
            hidden = block.feed(normed)
        normed = _add_normed(hidden, residual, self.post_layernorm)
        return normed.view(len(images), *embedding.shape)

    def _patches(self, pixels: Tensor) -> Tensor:
        """Return `[num_patches, 3 * patch_size * patch_size]` of the model's dtype."""
        rows, side = self._vision.patches_per_side, self._vision.patch_size
        split = self._normalize.run(pixels).view(3, rows, side, rows, side)
        return split.permute(1, 3, 0, 2, 4).to(self._dtype).reshape(rows * rows, -1)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.embeddings.patch_embedding", self.patch_embedding
        yield f"{prefix}.embeddings.position_embedding", self.position_embedding
        for index, block in enumerate(self.blocks):
            yield from block.holders(f"{prefix}.encoder.layers.{index}")
        yield f"{prefix}.post_layernorm", self.post_layernorm


def _add_normed(hidden: Tensor | None, residual: Tensor, norm: LayerNorm) -> Tensor:
    """Add the previous block's output, if any, to the stream, and return the stream's norm."""
    return norm.forward(residual) if hidden is None else norm.add_forward(hidden, residual)
