"""An image of a prompt, from the front that prepared it to the model that sees it."""

from __future__ import annotations

import msgspec


class PreparedImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image decoded, scaled and counted; not yet bound to a place in a prompt.

    Attributes:
        digest: 16 bytes, a hash that the server computes of `pixels`, their shape, the numbers of
            the processor and the tenant. What the tower gives and cached prefixes are known by it.
        size: `(channels, height, width)` of `pixels`; both sides fit the model's patches.
        num_tokens: placeholder tokens that it takes in the prompt.
        pixels: uint8, in the order of `size`, scaled to the size and not yet normalised: what
            `VisionSpec` normalises is a quarter of the float32 bytes on its way.
    """

    digest: bytes
    size: tuple[int, int, int]
    num_tokens: int
    pixels: bytes


class ImageInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image at its place.

    Attributes:
        start: place in the prompt of its first placeholder; `image.num_tokens` stand in a row.
        image: what stands there.
    """

    start: int
    image: PreparedImage
