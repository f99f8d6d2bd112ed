"""What the front and the process that decodes images say to each other."""

from __future__ import annotations

import msgspec

from runtime.checkpoint.vision_spec import Resizing


class ImageJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file and how the model wants it.

    Attributes:
        content: the file's bytes, or base64 of them.
        factor: pixels of the side of what becomes one token, under `patches`.
        side: pixels of the result's sides, under `square`.
        resample: Pillow's number of the filter.
    """

    content: bytes
    is_base64: bool
    resizing: Resizing
    factor: int
    min_pixels: int
    max_pixels: int
    side: int
    resample: int


class ScaledImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What came of a job.

    Attributes:
        height, width: of the pixels.
        pixels: uint8, `[3, height, width]`.
        error: why there are none, for the client.
        is_busy: whether it may work at another time.
    """

    height: int = 0
    width: int = 0
    pixels: bytes = b""
    error: str = ""
    is_busy: bool = False
