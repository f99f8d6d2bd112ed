"""The process that decodes and scales images, each in a separate fork.

A file that crashes the decoder, keeps it busy forever or unpacks to gigabytes ends only its fork.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import io
import os
from typing import Any

import msgspec
from PIL import Image, ImageOps

from runtime.ipc.fork_server import serve
from runtime.ipc.limited_forks import ForkEnd, ForkLimits
from runtime.media.image_job import ImageJob, ScaledImage, split
from runtime.media.image_size import MAX_ASPECT_RATIO, MAX_PIXELS, scaled_size
from runtime.media.image_source import FORMATS, MAX_IMAGE_BYTES, format_of

MIN_SIDE, MAX_SIDE = 4, 32_768
# The wall time is longer than the processor time, as the machine may be busy. A picture takes 4
# bytes for each of `MAX_PIXELS`, and several copies of it exist at a time.
LIMITS = ForkLimits(timeout_s=20.0, cpu_s=8.0, memory_bytes=1536 * 2**20)
_DECODERS = tuple(f"PIL.{kind}ImagePlugin" for kind in ("Gif", "Jpeg", "Mpo", "Png", "WebP"))
_SIZES = f"width and height may be {MIN_SIDE} to {MAX_SIDE} pixels each and {MAX_PIXELS:,} together"
_DAMAGED = "the file is damaged or cut off"


_encode = msgspec.msgpack.Encoder().encode


class _Refused(Exception):
    """The file is refused; the message is for the client."""


def scale(job: ImageJob, content: bytes) -> ScaledImage:
    """Decode and scale a file; errors in the file are reported in the answer."""
    try:
        image = _scaled(_decoded(_file(job, content)), job)
    except _Refused as error:
        return ScaledImage(error=str(error))
    # One colour band after the other.
    pixels = b"".join(band.tobytes() for band in image.split())
    return ScaledImage(image.height, image.width, pixels)


def _file(job: ImageJob, content: bytes) -> bytes:
    if job.is_base64:
        joined = b"".join(content.split())
        try:
            content = base64.b64decode(joined + b"=" * (-len(joined) % 4), validate=True)
        except binascii.Error:
            raise _Refused("this is not base64") from None
    if len(content) > MAX_IMAGE_BYTES:
        raise _Refused(f"it has more than {MAX_IMAGE_BYTES >> 20} MiB")
    return content


def _decoded(content: bytes) -> Any:
    """The picture as RGB, upright."""
    kind = format_of(content)
    if kind is None:
        raise _Refused(f"it must be {FORMATS}, by its content")
    try:
        image = Image.open(io.BytesIO(content), formats=[kind])
        _check_header(image)
        image.load()
        return to_rgb(_upright(image))
    except (_Refused, MemoryError):
        raise
    # Decoders raise many kinds of errors: of struct, of zlib, SyntaxError, IndexError.
    except Exception:
        raise _Refused(_DAMAGED) from None


def _check_header(image: Any) -> None:
    width, height = image.size
    if min(width, height) < MIN_SIDE or max(width, height) > MAX_SIDE:
        raise _Refused(f"{_SIZES}, it has {width} x {height}")
    if width * height > MAX_PIXELS:
        raise _Refused(f"{_SIZES}, it has {width} x {height}")
    # A GIF's first picture is used, and the test for animation would read all of them.
    if image.format in ("PNG", "WEBP") and image.is_animated:
        raise _Refused("it is animated; send one picture, or a GIF, whose first one is taken")


def _upright(image: Any) -> Any:
    """The picture turned upright by its EXIF data; unchanged if these are missing or invalid."""
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:
        return image


def to_rgb(image: Any) -> Any:
    """A picture in any of Pillow's modes as RGB; transparent parts become white.

    Source: `convert_to_rgb` of `transformers`. Its `load_image` drops transparency instead, which
    shows colours that are never visible.
    """
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _scaled(image: Any, job: ImageJob) -> Any:
    if job.resizing == "square":
        size = job.side, job.side
    else:
        longer, shorter = max(image.size), min(image.size)
        if longer > MAX_ASPECT_RATIO * shorter:
            raise _Refused(
                f"one side may be at most {MAX_ASPECT_RATIO} times the other, it has "
                f"{image.width} x {image.height}"
            )
        size = scaled_size(
            image.height,
            image.width,
            factor=job.factor,
            min_pixels=job.min_pixels,
            max_pixels=job.max_pixels,
        )
    height, width = size
    return image.resize((width, height), resample=job.resample)


def work(payload: bytes) -> bytes:
    """In a fork: make the answer to a job."""
    try:
        return _encode(scale(*split(payload)))
    except MemoryError:
        return _encode(ScaledImage(error="decoding it takes too much memory"))


def answer_of(end: ForkEnd) -> bytes:
    """The reply to the front from a fork that has ended."""
    if end.got_no_processor:
        return _encode(ScaledImage(error="the machine is too busy to decode it", is_busy=True))
    return end.answer or _encode(ScaledImage(error="the decoder cannot cope with it"))


def main() -> None:
    """Decode until the front has gone."""
    # Our own limit is lower, and its message says more.
    Image.MAX_IMAGE_PIXELS = None
    for name in _DECODERS:
        # Imported once, for all forks.
        importlib.import_module(name)
    serve(work, answer_of, LIMITS, max(2, min(8, len(os.sched_getaffinity(0)) // 4)))


if __name__ == "__main__":
    main()
