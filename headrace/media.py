"""Images and videos as base64 text, from whatever a program holds them in."""

from __future__ import annotations

import base64
import binascii
import io
import os
import urllib.parse
from pathlib import Path
from typing import Any

# Seconds to wait for a picture on the web; the variable's name is the reference's.
_TIMEOUT_VARIABLE = "REQUEST_TIMEOUT"
_DEFAULT_TIMEOUT_S = 3.0
_MIME_SIGNS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
)


def read_image_bytes(source: Any) -> bytes:
    """The encoded bytes of a picture.

    Args:
        source: bytes, a path, an `http(s)` or `file` URL, a data URL, base64 text, a PIL image, or
            the pair that `load_image` gives.

    Raises:
        FileNotFoundError: text that is no URL, no file and no base64.
        TypeError: an object of another kind.
        ValueError: a data URL without base64, or a server that does not give the picture.
    """
    if isinstance(source, tuple) and len(source) == 2:
        source = source[0]
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Path):
        return source.read_bytes()
    if isinstance(source, str):
        return _read_text_source(source)
    if callable(getattr(source, "save", None)):
        buffer = io.BytesIO()
        source.save(buffer, format="PNG")
        return buffer.getvalue()
    raise TypeError(
        "An image is bytes, a path, a URL, base64 text or a PIL image, not "
        f"{type(source).__name__}."
    )


def _read_text_source(source: str) -> bytes:
    scheme = source.partition(":")[0].lower()
    if scheme in ("http", "https"):
        return _download(source)
    if scheme == "file":
        return Path(urllib.parse.unquote(urllib.parse.urlsplit(source).path)).read_bytes()
    if scheme == "data":
        head, comma, content = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise ValueError("A data URL of an image looks like data:image/png;base64,....")
        return _from_base64(content, "the data URL")
    # A name that no file system takes is base64, not a path.
    if len(source) < 4096 and "\0" not in source and Path(source).is_file():
        return Path(source).read_bytes()
    try:
        return _from_base64(source, "the text")
    except ValueError:
        raise FileNotFoundError(
            f"{source[:200]!r} is no file, no URL and no base64 of an image."
        ) from None


def _from_base64(content: str, what: str) -> bytes:
    try:
        found = base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{what} holds no base64.") from None
    if not found:
        raise ValueError(f"{what} holds no picture.")
    return found


def _download(url: str) -> bytes:
    import httpx

    try:
        timeout_s = float(os.environ.get(_TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT_S))
        response = httpx.get(url, timeout=timeout_s, follow_redirects=True)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(f"{url} does not give an image: {error}") from error
    return response.content


def mime_type(content: bytes) -> str:
    """What kind of picture the first bytes say it is; PNG where they say nothing."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    for sign, name in _MIME_SIGNS:
        if content.startswith(sign):
            return name
    return "image/png"


def encode_image_base64(image: Any) -> str:
    """A picture as base64 text; see `read_image_bytes` for what it may be."""
    return base64.b64encode(read_image_bytes(image)).decode()


def load_image(image_file: Any) -> tuple[Any, tuple[int, int] | None]:
    """A picture, for `image(...)`.

    Args:
        image_file: see `read_image_bytes`.

    Returns:
        A PIL image where Pillow is installed, else the encoded bytes (`image` takes both); and the
        width and height where a PIL image was given, else `None`.
    """
    size = getattr(image_file, "size", None)
    if callable(getattr(image_file, "save", None)):
        return image_file, size
    content = read_image_bytes(image_file)
    try:
        from PIL import Image
    except ImportError:
        return content, None
    return Image.open(io.BytesIO(content)), None


def encode_frame(frame: Any) -> bytes:
    """One frame of a video as PNG; `frame` is `[height, width, 3]`, uint8, blue first."""
    cv2 = _cv2()
    done, png = cv2.imencode(".png", frame)
    if not done:
        raise ValueError("The frame cannot be written as PNG.")
    return bytes(png)


def encode_video_base64(video_path: str | Path, num_frames: int = 16) -> str:
    """Frames of a video at equal distances, as `video:` and the base64 of their PNG files.

    Args:
        video_path: a file.
        num_frames: how many to take; all of a shorter video.

    Raises:
        FileNotFoundError: no video can be opened there.
        ImportError: OpenCV is missing.
    """
    cv2 = _cv2()
    video = cv2.VideoCapture(str(video_path))
    if not video.isOpened():
        raise FileNotFoundError(f"{video_path} cannot be opened as a video.")
    try:
        total = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        taken = min(num_frames, total)
        frames = []
        for i in range(taken):
            video.set(cv2.CAP_PROP_POS_FRAMES, i * (total - 1) // max(taken - 1, 1))
            is_there, frame = video.read()
            if is_there:
                frames.append(encode_frame(frame))
    finally:
        video.release()
    if not frames:
        raise ValueError(f"{video_path} holds no frame.")
    return "video:" + base64.b64encode(b"".join(frames)).decode()


def _cv2() -> Any:
    try:
        import cv2
    except ImportError:
        raise ImportError(
            "Videos are read with OpenCV: pip install opencv-python-headless"
        ) from None
    return cv2
