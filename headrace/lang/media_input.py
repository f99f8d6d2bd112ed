"""Images and videos as inputs: whatever a user has, as base64 with its kind."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
)
_DATA_URL = re.compile(r"data:(?P<kind>[\w.+/-]+)?(;[\w.+=-]+)*;base64,(?P<data>.*)", re.DOTALL)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
# Shorter text is a file's name.
_MIN_BASE64_CHARS = 64
DEFAULT_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Media:
    """One image or video.

    Attributes:
        data: base64; of a video, the frames' PNG files behind one another.
        mime_type: of an image, by its first bytes.
        is_video: whether it holds frames.
    """

    data: str
    mime_type: str
    is_video: bool = False

    @property
    def wire(self) -> str:
        """As `image_data` of the native API takes it."""
        return f"video:{self.data}" if self.is_video else self.data

    @property
    def data_url(self) -> str:
        """As OpenAI's API takes it."""
        return f"data:{self.mime_type};base64,{self.data}"


def mime_type_of(content: bytes) -> str:
    """The kind of an image by its first bytes; JPEG where they are unknown."""
    for signature, kind in _SIGNATURES:
        if content.startswith(signature):
            return kind
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return "image/jpeg"


def load_media(source: Any) -> Media:
    """Read an image; may block, so call it in a thread.

    Args:
        source: a path, an address (http, https, file), a data URL, base64, bytes, an image object
            of PIL, or the pair that `load_image` gives.

    Raises:
        OSError: no such file, or the address does not answer.
        TypeError: nothing of that.
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
        target = io.BytesIO()
        source.save(target, format="PNG")
        content = target.getvalue()
    else:
        raise TypeError(
            "An image is a path, an address, a data URL, base64, bytes or a PIL image, not "
            f"{type(source).__name__}."
        )
    return Media(base64.b64encode(content).decode("ascii"), mime_type_of(content))


def _read(source: str) -> bytes:
    if source.startswith(("http://", "https://")):
        # Slow to import, and few programs fetch.
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
    return Path(source.removeprefix("file://")).read_bytes()


def load_video(source: Any, num_frames: int) -> Media:
    """Sample frames uniformly; may block, so call it in a thread.

    Raises:
        ImportError: the library that reads videos is not installed.
        OSError: no such file, or no frames in it.
    """
    try:
        import cv2  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ImportError(
            "video() reads frames by OpenCV: pip install opencv-python-headless."
        ) from None
    reader = cv2.VideoCapture(os.fspath(source))
    total = int(reader.get(cv2.CAP_PROP_FRAME_COUNT))
    if total <= 0:
        raise OSError(f"No frames in {source}.")
    frames = []
    for index in (round(i * (total - 1) / max(num_frames - 1, 1)) for i in range(num_frames)):
        reader.set(cv2.CAP_PROP_POS_FRAMES, index)
        ok, frame = reader.read()
        if ok:
            frames.append(cv2.imencode(".png", frame)[1].tobytes())
    reader.release()
    data = base64.b64encode(b"".join(frames)).decode("ascii")
    return Media(data, "image/png", is_video=True)
