"""The process that decodes and scales images, each image in its own fork.

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
# An image gets more wall time than processor time, because the machine may be busy. Decoded, it
# takes 4 bytes for each of up to `MAX_PIXELS`, and several copies exist at a time.
LIMITS = ForkLimits(timeout_s=20.0, cpu_s=8.0, memory_bytes=1536 * 2**20)
_DECODERS = tuple(f"PIL.{kind}ImagePlugin" for kind in ("Gif", "Jpeg", "Mpo", "Png", "WebP"))
_SIZES = f"width and height may be {MIN_SIDE} to {MAX_SIDE} pixels each and {MAX_PIXELS:,} together"
_DAMAGED = "the file is damaged or cut off"


_encode = msgspec.msgpack.Encoder().encode


class _Refused(Exception):
    """A file is refused; the message is for the client."""


def scale(job: ImageJob, content: bytes) -> ScaledImage:
    """Decode and scale an image file; an error in the file is reported in the result."""
    try:
        image = _scaled(_decoded(_file(job, content)), job)
    except _Refused as error:
        return ScaledImage(error=str(error))
    # The layout is channels first: one color band after the other.
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
    """Return an image file's picture as RGB, turned upright."""
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
    # Decoders raise errors of many kinds: of struct, of zlib, SyntaxError, IndexError.
    except Exception:
        raise _Refused(_DAMAGED) from None


def _check_header(image: Any) -> None:
    width, height = image.size
    if min(width, height) < MIN_SIDE or max(width, height) > MAX_SIDE:
        raise _Refused(f"{_SIZES}, it has {width} x {height}")
    if width * height > MAX_PIXELS:
        raise _Refused(f"{_SIZES}, it has {width} x {height}")
    # A GIF may be animated; its first picture is used. It is not tested, because the test would
    # read all of its pictures.
    if image.format in ("PNG", "WEBP") and image.is_animated:
        raise _Refused("it is animated; send one picture, or a GIF, whose first one is taken")


def _upright(image: Any) -> Any:
    """Turn a picture upright by its EXIF data; leave it if these are missing or invalid."""
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:
        return image


def to_rgb(image: Any) -> Any:
    """Return a picture in any of Pillow's modes as RGB; transparent parts become white.

    Source: `convert_to_rgb` of `transformers`. Its `load_image` drops transparency instead, which
    shows colors that are never visible.
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
    """Return the result of a job; called in a fork."""
    try:
        return _encode(scale(*split(payload)))
    except MemoryError:
        return _encode(ScaledImage(error="decoding it takes too much memory"))


def answer_of(end: ForkEnd) -> bytes:
    """Return the reply to the front process after a fork has ended; called in the fork's parent."""
    if end.got_no_processor:
        return _encode(ScaledImage(error="the machine is too busy to decode it", is_busy=True))
    return end.answer or _encode(ScaledImage(error="the decoder cannot cope with it"))


def main() -> None:
    """Decode images until the front process has ended."""
    # Pillow's limit is off, because the limit of `_check_header` is lower and explains itself.
    Image.MAX_IMAGE_PIXELS = None
    for name in _DECODERS:
        # Each decoder is imported once, before the forks.
        importlib.import_module(name)
    serve(work, answer_of, LIMITS, max(2, min(8, len(os.sched_getaffinity(0)) // 4)))


if __name__ == "__main__":
    main()
