"""An image of a prompt, prepared by the front process and sent to the worker."""

from __future__ import annotations

import msgspec


class PreparedImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image that is decoded and scaled, with its number of tokens but without a position.

    Attributes:
        digest: 16 bytes, the server's hash of `pixels`, their shape, the processor's parameters and
            the tenant. Image vectors and cached prefixes are found by it.
        size: `(channels, height, width)` of `pixels`; both sides are multiples of a patch.
        num_tokens: number of placeholder tokens that the image takes in the prompt.
        pixels: uint8 in the shape `size`, scaled but not yet normalised (see `VisionSpec`); float32
            would take four times as many bytes.
    """

    digest: bytes
    size: tuple[int, int, int]
    num_tokens: int
    pixels: bytes


class ImageInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image at its position in a prompt.

    Attributes:
        start: position of the image's first placeholder; the image has `image.num_tokens`
            consecutive placeholders.
        image: the image.
    """

    start: int
    image: PreparedImage
