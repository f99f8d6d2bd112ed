"""Converts images in the messages of a batch's lines to base64.

The user owns the file and the images, so paths and URLs are read as in the user's own program.
"""

from __future__ import annotations

from typing import Any

from headrace.engine.own_images import inline_images
from openai_api.content_parts import inline_image


def inline_body(body: dict[str, Any], *, sees: bool) -> dict[str, Any]:
    """Return an OpenAI request body whose images are replaced by base64 data URLs.

    Reads files and fetches URLs, so it may block.

    Raises:
        InvalidRequest: an image cannot be read.
    """
    if "messages" not in body:
        return body
    return {**body, "messages": inline_messages(body["messages"], sees=sees)}


def inline_messages(messages: Any, *, sees: bool) -> Any:
    """Return messages in which paths and URLs of images are replaced by base64 data URLs.

    Reads files and fetches URLs, so it may block.

    Args:
        messages: the messages of an input line, not validated yet.
        sees: whether the model takes images. If not, the messages are returned unchanged, and a
            later check refuses the request.

    Raises:
        InvalidRequest: an image cannot be read.
    """
    if not sees or not isinstance(messages, list):
        return messages
    return [_message(message) for message in messages]


def urls_of(messages: Any) -> list[str] | None:
    """Return the images' data URLs in messages from `inline_messages`; None without images."""
    found = [
        part["image_url"]["url"]
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
        if _is_image(part)
    ]
    return found or None


def _message(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    if not _is_image(part):
        return part
    given = part["image_url"]
    url = given["url"] if isinstance(given, dict) else given
    inlined = inline_images(url, sees=True)
    address = inlined if inlined.startswith("data:") else inline_image(inlined)
    others = given if isinstance(given, dict) else {}
    return {**part, "image_url": {**others, "url": address}}


def _is_image(part: Any) -> bool:
    given = part.get("image_url") if isinstance(part, dict) else None
    url = given.get("url") if isinstance(given, dict) else given
    return isinstance(url, str) and bool(url)
