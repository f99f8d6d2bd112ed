"""Converts images that a program passes to the offline engine, from any source, to base64."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from headrace.lang.media_input import load_media
from runtime.errors import InvalidRequest
from runtime.media.image_loader import NO_VISION
from runtime.media.image_source import ImageUrl, InlineImage, read_item

_PARAM = "image_data"
_MAX_PATH_CHARS = 4096


def inline_images(image_data: Any, *, sees: bool) -> Any:
    """Return `image_data` in the native API's form, with every image as base64.

    It reads files and fetches URLs, so it may block.

    Args:
        image_data: an image, a list of images, or a list of such lists. An image is a path, a URL,
            a data URL, base64, bytes, a PIL image, or a result of `load_image`.
        sees: whether the model takes images.

    Raises:
        InvalidRequest: the model does not take images, or an image cannot be read.
    """
    if isinstance(image_data, list):
        return [inline_images(each, sees=sees) for each in image_data]
    if image_data is None or (isinstance(image_data, str) and not image_data):
        return None
    if not sees:
        raise InvalidRequest(f"{_PARAM}: {NO_VISION}.", param=_PARAM)
    if isinstance(image_data, ImageUrl):
        image_data = image_data.url
    if isinstance(image_data, Mapping) and "url" in image_data:
        image_data = image_data["url"]
    if isinstance(image_data, str) and _is_inline(image_data):
        return image_data
    try:
        data = load_media(image_data).data
    except (OSError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{_PARAM}: {error}", param=_PARAM) from None
    if not data:
        raise InvalidRequest(f"{_PARAM}: the image is empty.", param=_PARAM)
    return data


def _is_inline(text: str) -> bool:
    if len(text) < _MAX_PATH_CHARS and os.path.exists(text):
        return False
    return isinstance(read_item(text, _PARAM), InlineImage)
