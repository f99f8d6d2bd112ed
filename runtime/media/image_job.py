"""Messages between the front process and the process that decodes images."""

from __future__ import annotations

import msgspec

from runtime.checkpoint.vision_spec import Resizing


class ImageJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How to scale an image for the model; the image file follows this message.

    Attributes:
        is_base64: whether the file is sent as base64.
        resizing: how the new size is found: `patches` keeps proportions, `square` does not.
        factor: side of the square that becomes one token, pixels; used with `patches`.
        min_pixels, max_pixels: bounds on the size of the result; used with `patches`.
        side: width and height of the result, pixels; used with `square`.
        resample: Pillow's number of the resampling filter.
    """

    is_base64: bool
    resizing: Resizing
    factor: int
    min_pixels: int
    max_pixels: int
    side: int
    resample: int


class ScaledImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of a job.

    Attributes:
        height, width: size of the scaled image, pixels.
        pixels: uint8, `[3, height, width]`.
        error: why there are no pixels, for the client; empty if there are.
        is_busy: whether the same job may succeed later.
    """

    height: int = 0
    width: int = 0
    pixels: bytes = b""
    error: str = ""
    is_busy: bool = False


# Bytes of the number with which a job begins: the size of its encoded `ImageJob`. The `ImageJob`
# and the file follow.
SIZE_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ImageJob)


def head_of(job: ImageJob) -> bytes:
    """Return the bytes of a job before the file."""
    encoded = _encode(job)
    return len(encoded).to_bytes(SIZE_BYTES, "little") + encoded


def split(payload: bytes) -> tuple[ImageJob, bytes]:
    """Return the two parts of a job: the `ImageJob` and the file."""
    end = SIZE_BYTES + int.from_bytes(payload[:SIZE_BYTES], "little")
    return _decoder.decode(payload[SIZE_BYTES:end]), payload[end:]
