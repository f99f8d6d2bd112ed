"""Makes chat message parts from the texts and images of requests to the other APIs."""

from __future__ import annotations

from openai_api.schemas.chat import ContentPart
from runtime.errors import InvalidRequest
from runtime.media.image_loader import NO_VISION

Content = str | list[ContentPart]
_MAX_KIND_CHARS = 64


def note(kind: str) -> str:
    """Return the text that replaces a part of type `kind` that the model cannot read."""
    return f"[{kind[:_MAX_KIND_CHARS]}: not shown, this model reads text only]"


def text_part(text: str) -> ContentPart:
    """Return a text part."""
    return ContentPart(type="text", text=text)


def image_part(url: str | None, where: str, *, sees: bool) -> ContentPart:
    """Return an image part.

    Args:
        url: an address, a data URL or base64; `None` if the request has none.
        where: the image's path in the request, for errors.
        sees: whether the model takes images.

    Raises:
        InvalidRequest: the model takes no images, or the address is missing.
    """
    if not sees:
        raise InvalidRequest(f"{where}: {NO_VISION}.", param=where)
    if not url:
        raise InvalidRequest(f"{where}: an image needs an address, or its data.", param=where)
    return ContentPart(type="image_url", image_url=url)


def inline_image(data: str) -> str:
    """Return the data URL of a base64 image; the image's format is read from its content later."""
    return f"data:image/any;base64,{data}"


def joined(parts: list[ContentPart]) -> Content:
    """Join parts to a content: one text with a line per part, or the parts if one is an image."""
    if all(part.text is not None for part in parts):
        return "\n".join(part.text or "" for part in parts)
    return parts


def merged(parts: list[ContentPart]) -> Content:
    """Join parts to a content in which neighboring texts are one text.

    Empty texts at the beginning are omitted.
    """
    found: list[ContentPart] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            found.append(text_part("\n".join(texts)))
            texts.clear()

    for part in parts:
        if part.text is None:
            end_text()
            found.append(part)
        elif part.text or texts or found:
            texts.append(part.text)
    end_text()
    return joined(found)
