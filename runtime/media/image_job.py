"""What the front and the process that decodes images say to each other."""

from __future__ import annotations

import msgspec

from runtime.checkpoint.vision_spec import Resizing


class ImageJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the model wants a file, which comes behind it.

    Attributes:
        is_base64: whether that is base64 of the file's bytes.
        factor: pixels of the side of what becomes one token, under `patches`.
        side: pixels of the result's sides, under `square`.
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


# A job is the size of its encoded `ImageJob`, that, and the file.
SIZE_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ImageJob)


def head_of(job: ImageJob) -> bytes:
    """What comes in front of the file."""
    encoded = _encode(job)
    return len(encoded).to_bytes(SIZE_BYTES, "little") + encoded


def split(payload: bytes) -> tuple[ImageJob, bytes]:
    """The job and the file."""
    end = SIZE_BYTES + int.from_bytes(payload[:SIZE_BYTES], "little")
    return _decoder.decode(payload[SIZE_BYTES:end]), payload[end:]
