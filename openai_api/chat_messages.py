"""Converts the messages of a request to the messages that chat templates read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from openai_api.billing_line import without_billing
from openai_api.call_arguments import told_arguments
from openai_api.content_form import Content, ContentForm, in_form
from openai_api.content_parts import note, text_part
from openai_api.schemas.chat import ChatMessage, ContentPart, ToolCall
from runtime.errors import InvalidRequest
from runtime.media.image_loader import NamedItem

_MEDIA = ("image", "video", "audio", "file")
_IMAGE = "image_url"
_INSTRUCTIONS = ("system", "developer")
_TEXTS = ("text", "refusal")
_RESULTS = ("tool", "function")


@dataclass(frozen=True, kw_only=True)
class TemplateShape:
    """What template and model can take, which decides how messages are converted.

    Attributes:
        form_of: returns the form in which the template reads the content of a role: as a text, as
            parts, or either. For a text, the texts of parts are joined by a space.
        knows_developer: whether the template renders the role `developer`. If not, `developer`
            becomes `system`, its predecessor, because many templates silently drop unknown roles.
        sees: whether the model takes images.
    """

    form_of: Callable[[str], ContentForm]
    knows_developer: bool
    sees: bool = False


def with_notes(messages: list[ChatMessage], shape: TemplateShape) -> list[ChatMessage]:
    """Replace each part of a tool's result that the model cannot read by a short note.

    Tools may return images or files to a model that takes only text. Such a result must not make
    the request fail.
    """
    can_see = shape.sees and shape.form_of("tool") is not ContentForm.TEXT
    readable = (*_TEXTS, _IMAGE) if can_see else _TEXTS

    def noted(message: ChatMessage) -> ChatMessage:
        content = message.content
        if message.role.lower() not in _RESULTS or not isinstance(content, list):
            return message
        if all(part.type in readable for part in content):
            return message
        parts = [part if part.type in readable else text_part(note(part.type)) for part in content]
        return msgspec.structs.replace(message, content=parts)

    return [noted(message) for message in messages]


def template_messages(messages: list[ChatMessage], shape: TemplateShape) -> list[dict[str, Any]]:
    """Convert a conversation whose roles are checked already.

    Raises:
        InvalidRequest: the model or the template does not take one of the parts.
    """
    return [
        _message(message, f"messages[{index}]", shape)
        for index, message in enumerate(messages)
        if not _is_billing(message)
    ]


def image_items(messages: list[ChatMessage]) -> list[NamedItem]:
    """Return the images of a conversation, in the order in which a template renders them."""
    return [
        NamedItem(part.image_url, f"messages[{index}].content[{at}]")
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for at, part in enumerate(message.content)
        if part.type == _IMAGE and part.image_url is not None
    ]


def _is_billing(message: ChatMessage) -> bool:
    text = message.content
    return (
        message.role.lower() in _INSTRUCTIONS
        and isinstance(text, str)
        and bool(text)
        and not without_billing(text)
    )


def _message(message: ChatMessage, where: str, shape: TemplateShape) -> dict[str, Any]:
    role = message.role.lower()
    if role == "developer" and not shape.knows_developer:
        role = "system"
    converted: dict[str, Any] = {}
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        # Templates read reasoning under different names. `transformers` sets both names too.
        converted["thinking"] = reasoning
    converted["role"] = role
    converted["content"] = _content(message, where, shape, shape.form_of(role))
    if reasoning:
        converted["reasoning_content"] = reasoning
    if message.name is not None:
        converted["name"] = message.name
    if message.tool_call_id is not None:
        converted["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        converted["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return converted


def _content(message: ChatMessage, where: str, shape: TemplateShape, form: ContentForm) -> Content:
    content = message.content
    instructs = message.role.lower() in _INSTRUCTIONS
    if content is None or isinstance(content, str):
        text = message.refusal or "" if content is None else content
        return in_form(without_billing(text) if instructs else text, form)
    parts = [_part(part, f"{where}.content[{at}]", shape.sees) for at, part in enumerate(content)]
    if instructs:
        parts = [part for part in map(_without_billing, parts) if part.get("text") != ""]
    converted = in_form(parts, form)
    if form is ContentForm.TEXT and not isinstance(converted, str):
        raise InvalidRequest(
            f"{where}: this server's chat template has no place for images.", param=where
        )
    return converted


def _without_billing(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "text": without_billing(part["text"])} if "text" in part else part


def _part(part: ContentPart, where: str, sees: bool) -> dict[str, Any]:
    if part.type == "text" and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type == "refusal" and part.refusal is not None:
        return {"type": "text", "text": part.refusal}
    if sees and part.type == _IMAGE:
        if part.image_url is None:
            raise InvalidRequest(f"{where}.image_url must be given.", param=f"{where}.image_url")
        return {"type": "image"}
    if any(kind in part.type for kind in _MEDIA):
        takes = f"text and images ({_IMAGE}) only" if sees else "text only"
        raise InvalidRequest(f"{where}: this model takes {takes}.", param=where)
    raise InvalidRequest(f"{where} must be a text part with its text.", param=where)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    assert call.function is not None, "settled before"
    converted: dict[str, Any] = {
        "type": call.type or "function",
        "function": {
            "name": call.function.name,
            "arguments": told_arguments(call.function.arguments),
        },
    }
    if call.id is not None:
        converted["id"] = call.id
    return converted
