"""Messages between the front and the process that decodes images."""

from __future__ import annotations

import msgspec

from runtime.checkpoint.vision_spec import Resizing


class ImageJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Says how to scale a file for the model; the file follows the message.

    Attributes:
        is_base64: whether the file is sent as base64.
        factor: side of the square that becomes one token, pixels; used with `patches`.
        side: sides of the result, pixels; used with `square`.
        resample: Pillow's number of the filter.
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
        error: why there are no pixels, for the client.
        is_busy: whether a later attempt may succeed.
    """

    height: int = 0
    width: int = 0
    pixels: bytes = b""
    error: str = ""
    is_busy: bool = False


# A job on the wire: the size of its encoded `ImageJob`, the `ImageJob`, and the file.
SIZE_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ImageJob)


def head_of(job: ImageJob) -> bytes:
    """The bytes before the file."""
    encoded = _encode(job)
    return len(encoded).to_bytes(SIZE_BYTES, "little") + encoded


def split(payload: bytes) -> tuple[ImageJob, bytes]:
    """The job and the file."""
    end = SIZE_BYTES + int.from_bytes(payload[:SIZE_BYTES], "little")
    return _decoder.decode(payload[SIZE_BYTES:end]), payload[end:]
