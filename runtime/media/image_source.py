"""Finds where an image of a request comes from: inline data, a URL, or a file."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Literal

import msgspec

from runtime.errors import InvalidRequest

# The most bytes of an image file.
MAX_IMAGE_BYTES = 20 * 2**20
FORMATS = "PNG, JPEG, WebP or GIF"
# The first bytes of files of these formats. In WebP, four more letters follow after a size.
SIGNATURES = {
    "PNG": b"\x89PNG\r\n\x1a\n",
    "JPEG": b"\xff\xd8\xff",
    "GIF": b"GIF8",
    "WEBP": b"RIFF",
}
_WEBP_AT = 8
# Characters of base64 that hold the longest signature; the number must be a multiple of four.
_LOOKED_AT = 16
_SPACES = re.compile(r"\s")
# Matches a character that a path may have and base64 does not. (Base64 may begin with a slash, but
# of the formats only that of a JPEG does.)
_OF_A_PATH = re.compile(r"[^A-Za-z0-9+/=\s]")
_MAX_PATH_CHARS = 4096
# The most characters of a data URL before its data.
_MAX_KIND_CHARS = 256


class ImageUrl(msgspec.Struct, kw_only=True):
    """An image as an object.

    Attributes:
        url: a URL (http, https), a data URL, base64, or a file (`file://`, a path).
        detail: sent by OpenAI's clients; it has no effect, because the size is the model's.
        max_dynamic_patch: for models that cut images into tiles, which no supported model does.
    """

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    max_dynamic_patch: int | None = None


ImageItem = str | ImageUrl
ImageData = str | ImageUrl | list[str | ImageUrl | list[str | ImageUrl | None] | None]


@dataclass(frozen=True)
class InlineImage:
    """An image file's bytes, or their base64 text."""

    content: bytes | memoryview
    is_base64: bool = True


@dataclass(frozen=True)
class RemoteImage:
    """A URL from which an image is fetched."""

    url: str


@dataclass(frozen=True)
class FileImage:
    """An image file on the server's machine."""

    path: str


ImageSource = InlineImage | RemoteImage | FileImage


def format_of(content: bytes) -> str | None:
    """Return Pillow's name of a file's format, from its first bytes; `None` if unsupported."""
    for name, signature in SIGNATURES.items():
        if content.startswith(signature):
            if name == "WEBP" and content[_WEBP_AT : _WEBP_AT + 4] != b"WEBP":
                return None
            return name
    return None


def read_item(item: ImageItem, param: str) -> ImageSource:
    """Return the source of an image; nothing is fetched or opened yet.

    Args:
        item: the image in the request.
        param: the image's path in the request, for errors.

    Raises:
        InvalidRequest: the image is too large, or has an unsupported form.
    """
    text = item if isinstance(item, str) else item.url
    head = text[:16].lower()
    if head.startswith(("http://", "https://")):
        return RemoteImage(text)
    if head.startswith("file:"):
        return FileImage(text[len("file:") :].removeprefix("//"))
    if head.startswith("data:"):
        comma = text.find(",", 0, _MAX_KIND_CHARS)
        if comma < 0 or not text[:comma].lower().endswith(";base64"):
            raise InvalidRequest(
                f"{param}: a data URL must be data:image/...;base64, and base64.", param=param
            )
        return _inline(text, comma + 1, param)
    if head.startswith("video:"):
        raise InvalidRequest(
            f"{param}: videos are not taken; send their frames as a list of images.", param=param
        )
    if _is_path(text):
        return FileImage(text)
    return _inline(text, 0, param)


def _is_path(text: str) -> bool:
    """Whether a text that is not a URL is more likely a path than base64."""
    if len(text) > _MAX_PATH_CHARS or not text:
        return False
    try:
        beginning = base64.b64decode(_SPACES.sub("", text[:_LOOKED_AT])[:_LOOKED_AT])
    except (binascii.Error, ValueError):
        beginning = b""
    if format_of(beginning) is not None:
        return False
    return text.startswith("/") or _OF_A_PATH.search(text) is not None


def _inline(text: str, begin: int, param: str) -> InlineImage:
    """Return the image whose base64 is `text[begin:]`, not decoded yet.

    The text may have tens of megabytes, so it is copied only once.

    Raises:
        InvalidRequest: the text is too large, empty or not ASCII.
    """
    if (len(text) - begin) * 3 // 4 > MAX_IMAGE_BYTES:
        raise too_many_bytes(param)
    try:
        content = memoryview(text.encode("ascii"))[begin:]
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param}: this is not base64.", param=param) from None
    if not content[:_LOOKED_AT].tobytes().strip():
        raise InvalidRequest(f"{param}: the image is empty.", param=param)
    return InlineImage(content)


def too_many_bytes(param: str) -> InvalidRequest:
    """Return the error for a file that is too large."""
    return InvalidRequest(
        f"{param}: an image may have at most {MAX_IMAGE_BYTES >> 20} MiB.", param=param
    )
