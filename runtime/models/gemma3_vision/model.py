"""Gemma 3 with images.

The outputs of SigLIP are averaged to a few vectors, which the decoder reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from runtime.models.gemma3_vision.spec import PROJECTOR, TOWER, Gemma3VisionSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.norm import RMSNorm
from runtime.models.layers.parameter import Parameter, WeightHolder, whole
from runtime.models.vision.model import SeeingDecoder
from runtime.models.vision.siglip import Siglip
from runtime.models.vision.tower import Tower


class Projection(WeightHolder):
    """A matrix product whose weight has one row per input, as its checkpoints store it.

    Packed kernels expect one row per output, so the product is plain torch.

    Attributes:
        parameter: `[in_features, out_features]`.
    """

    __slots__ = ("parameter",)

    def __init__(self, in_features: int, out_features: int, context: BuildContext) -> None:
        shape = (in_features, out_features)
        self.parameter = Parameter(shape, whole(shape), context.dtype, context.device)

    def apply(self, x: Tensor) -> Tensor:
        """Map `[..., in_features]` to `[..., out_features]`, a new tensor."""
        return x @ self.plain("weight")

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self.parameter

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Do nothing: the weight is used in the memory that the loader filled."""

    def discard(self) -> None:
        """Do nothing: the loader fills the weight in one go and leaves no partial state."""

    def plain(self, name: str) -> Tensor:  # noqa: ARG002  # there is one
        weight = self.parameter.tensor
        assert weight is not None, "the weight is not loaded, or was released"
        return weight

    def release(self) -> None:
        self.parameter.tensor = None

    @property
    def size_bytes(self) -> int:
        weight = self.parameter.tensor
        return 0 if weight is None else weight.nbytes


class Gemma3Tower(Tower):
    """The vision tower, and the projection of its outputs to the decoder's width."""

    def __init__(self, spec: Gemma3VisionSpec, context: BuildContext) -> None:
        """Build the layers."""
        vision = spec.vision
        self._pool = vision.merge_size
        self.siglip = Siglip(vision, context)
        self.norm = RMSNorm(vision.width, vision.layer_norm_eps, context, zero_centered=True)
        self.projection = Projection(vision.width, spec.hidden_size, context)

    def see(self, images: Sequence[Tensor]) -> list[Tensor]:
        pooled = pool_squares(self.siglip.forward(images), self._pool)
        num_images, num_tokens, width = pooled.shape
        normed = self.norm.forward(pooled.view(-1, width))
        vectors = self.projection.apply(normed).view(num_images, 1, num_tokens, -1)
        # Each image's vectors get memory of their own, because one image may be kept longer than
        # others.
        return [each.clone() for each in vectors]

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        yield from self.siglip.holders(f"{prefix}.{TOWER}")
        yield f"{prefix}.{PROJECTOR}.mm_soft_emb_norm", self.norm
        yield f"{prefix}.{PROJECTOR}.mm_input_projection", self.projection


class Gemma3Vision(SeeingDecoder):
    """Gemma 3's decoder with its vision tower."""

    def __init__(self, spec: Gemma3VisionSpec, context: BuildContext) -> None:
        super().__init__(spec, context, Gemma3Tower(spec, context))


def pool_squares(patches: Tensor, pool: int) -> Tensor:
    """Return the mean of each square of `pool` by `pool` neighboring patches.

    Args:
        patches: `[num_images, num_patches, width]` of square images, row by row.
        pool: side of a square in patches. It divides the patches along an image's side.

    Returns:
        `[num_images, num_patches / pool**2, width]`, a new tensor, row by row.
    """
    num_images, num_patches, width = patches.shape
    per_side = int(num_patches**0.5) // pool
    squares = patches.view(num_images, per_side, pool, per_side, pool, width)
    return squares.mean(dim=(2, 4)).flatten(1, 2)
