"""An image of a prompt, prepared by the front and sent to the model."""

from __future__ import annotations

import msgspec


class PreparedImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image that is decoded and scaled, with its number of tokens but without a position.

    Attributes:
        digest: 16 bytes, the server's hash of `pixels`, their shape, the parameters of the
            processor and the tenant. It is the key of the tower's output and of cached prefixes.
        size: `(channels, height, width)` of `pixels`; both sides fit the model's patches.
        num_tokens: placeholder tokens that the image takes in the prompt.
        pixels: uint8, in the order of `size`, scaled but not yet normalised by `VisionSpec`: so
            they take a quarter of the bytes of float32.
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
