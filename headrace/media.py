"""Functions for users' programs that convert images and frames of videos.

The results are base64 text, or values that `image(...)` of the frontend language takes.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from headrace.lang.media_input import load_media, load_video


def encode_image_base64(image: Any) -> str:
    """Encode an image as base64 text.

    Args:
        image: any type that `image(...)` takes: a path, a URL, bytes, a PIL image, ...

    Raises:
        OSError: the file does not exist, or the URL does not answer.
        TypeError: `image` has another type.
    """
    return load_media(image).data


def load_image(image_file: Any) -> tuple[Any, tuple[int, int] | None]:
    """Load an image for `image(...)`.

    Args:
        image_file: any type that `image(...)` takes.

    Returns:
        A PIL image if Pillow is installed, or else the encoded bytes (`image` takes both forms);
        and the width and height if a PIL image was given, or else `None`.

    Raises:
        OSError: the file does not exist, or the URL does not answer.
        TypeError: `image_file` is not an image.
    """
    if callable(getattr(image_file, "save", None)):
        return image_file, image_file.size
    content = base64.b64decode(load_media(image_file).data)
    try:
        from PIL import Image
    except ImportError:
        return content, None
    return Image.open(io.BytesIO(content)), None


def encode_frame(frame: Any) -> bytes:
    """Encode a frame of a video as PNG; `frame` is `[height, width, 3]`, uint8, in BGR order.

    Raises:
        ImportError: OpenCV is missing.
        ValueError: the array has another shape or type.
    """
    try:
        import cv2
    except ImportError:
        raise ImportError(
            "Frames are written by OpenCV: pip install opencv-python-headless"
        ) from None
    is_written, png = cv2.imencode(".png", frame)
    if not is_written:
        raise ValueError("The frame cannot be written as PNG.")
    return bytes(png)


def encode_video_base64(video_path: str | Path, num_frames: int = 16) -> str:
    """Encode evenly spaced frames of a video as `video:` and the base64 of their PNG files.

    Args:
        video_path: a file.
        num_frames: how many to take.

    Raises:
        ImportError: OpenCV is missing.
        OSError: the file does not exist, or holds no frames.
    """
    frames = [base64.b64decode(frame.data) for frame in load_video(video_path, num_frames)]
    return f"video:{base64.b64encode(b''.join(frames)).decode('ascii')}"
