"""Converts a user's images and videos, from any source, to base64 with a MIME type."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
)
_DATA_URL = re.compile(r"data:(?P<kind>[\w.+/-]+)?(;[\w.+=-]+)*;base64,(?P<data>.*)", re.DOTALL)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
# Text that is shorter than this is taken as a file name, not as base64.
_MIN_BASE64_CHARS = 64
DEFAULT_TIMEOUT_S = 3.0
# Modes of PIL images that PNG can store; images in other modes are converted to RGB.
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})


@dataclass(frozen=True)
class Media:
    """An image as base64 with its MIME type.

    Attributes:
        data: base64 of the image's file, as `image_data` of the native API takes it.
        mime_type: the type that the file's first bytes show.
    """

    data: str
    mime_type: str

    @property
    def data_url(self) -> str:
        """The image as a data URL, as OpenAI's API takes it."""
        return f"data:{self.mime_type};base64,{self.data}"


def mime_type_of(content: bytes) -> str:
    """Return the MIME type that an image's first bytes show, or JPEG's if they are unknown."""
    for signature, kind in _SIGNATURES:
        if content.startswith(signature):
            return kind
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return "image/jpeg"


def load_media(source: Any) -> Media:
    """Read an image; may block, so call it in a thread.

    Args:
        source: a path, a URL (http, https, file), a data URL, base64, bytes, a PIL image, or the
            pair that `load_image` returns.

    Raises:
        OSError: the file does not exist, or the URL does not answer.
        TypeError: `source` has another type.
    """
    if isinstance(source, tuple):
        source = source[0]
    if isinstance(source, str):
        found = _DATA_URL.fullmatch(source)
        if found:
            return Media(found["data"], found["kind"] or "image/jpeg")
        content = _read(source)
    elif isinstance(source, (bytes, bytearray, memoryview)):
        content = bytes(source)
    elif isinstance(source, os.PathLike):
        content = Path(source).read_bytes()
    elif hasattr(source, "save"):
        content = _png(source)
    else:
        raise TypeError(
            "An image is a path, an address, a data URL, base64, bytes or a PIL image, not "
            f"{type(source).__name__}."
        )
    return Media(base64.b64encode(content).decode("ascii"), mime_type_of(content))


def _read(source: str) -> bytes:
    if source.startswith(("http://", "https://")):
        # Imported only here, because httpx is slow to import and few programs fetch images.
        import httpx

        timeout_s = float(os.environ.get("REQUEST_TIMEOUT", DEFAULT_TIMEOUT_S))
        try:
            answer = httpx.get(source, timeout=timeout_s, follow_redirects=True)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise OSError(f"The image at {source} cannot be fetched: {error}") from error
        return answer.content
    if len(source) >= _MIN_BASE64_CHARS and _BASE64.fullmatch(source):
        try:
            return base64.b64decode(source, validate=False)
        except binascii.Error:
            pass
    if source.startswith("file:"):
        return Path(unquote(source.removeprefix("file:").removeprefix("//"))).read_bytes()
    return Path(source).read_bytes()


def _png(image: Any) -> bytes:
    """Return a PIL image as the bytes of a PNG file, with the camera's orientation tag."""
    options: dict[str, Any] = {}
    exif = image.getexif() if hasattr(image, "getexif") else None
    if exif:
        options["exif"] = exif
    if hasattr(image, "mode") and image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    target = io.BytesIO()
    image.save(target, format="PNG", **options)
    return target.getvalue()


def load_video(source: Any, num_frames: int) -> list[Media]:
    """Return frames of a video at equal distances; may block, so call it in a thread.

    Args:
        source: a path or bytes of a GIF, WebP or APNG, or of any file that OpenCV reads if it is
            installed; or a list of frames, each of a type that `load_media` takes.
        num_frames: most frames to return.

    Raises:
        ImportError: the library that reads such files is not installed.
        OSError: the file does not exist, or has no frames.
        ValueError: `num_frames` is below one.
    """
    if num_frames < 1:
        raise ValueError(f"A video needs at least one frame, got num_frames={num_frames}.")
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes)):
        return [load_media(source[at]) for at in _sample(len(source), num_frames)]
    return _animation(source, num_frames) or _film(source, num_frames)


def _sample(total: int, num_frames: int) -> list[int]:
    """Return indices of frames at equal distances, including the first and the last frame."""
    if total <= num_frames:
        return list(range(total))
    return [round(at * (total - 1) / max(num_frames - 1, 1)) for at in range(num_frames)]


def _animation(source: Any, num_frames: int) -> list[Media]:
    """Return frames of an animation that Pillow reads; empty for any other file."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        return []
    file = io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source)
    try:
        with Image.open(file) as image:
            frames = []
            for at in _sample(image.n_frames, num_frames):
                image.seek(at)
                frames.append(load_media(image.convert("RGB")))
            return frames
    except UnidentifiedImageError:
        return []


def _film(source: Any, num_frames: int) -> list[Media]:
    """Return frames of a video file that OpenCV reads."""
    try:
        import cv2  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ImportError(
            "video() reads GIF, WebP and APNG files and lists of frames; for other files it needs "
            "OpenCV: pip install opencv-python-headless."
        ) from None
    if isinstance(source, bytes):
        raise OSError(
            "From bytes video() reads only GIF, WebP and APNG; give the path of another file."
        )
    reader = cv2.VideoCapture(os.fspath(source))
    total = int(reader.get(cv2.CAP_PROP_FRAME_COUNT))
    if total <= 0:
        raise OSError(f"No frames in {source}.")
    frames = []
    for index in _sample(total, num_frames):
        reader.set(cv2.CAP_PROP_POS_FRAMES, index)
        ok, frame = reader.read()
        if ok:
            frames.append(load_media(cv2.imencode(".png", frame)[1].tobytes()))
    reader.release()
    return frames
