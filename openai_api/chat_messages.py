"""Messages as the wire has them become messages as chat templates read them."""

from __future__ import annotations

from typing import Any

import msgspec

from openai_api.schemas.chat import ChatMessage, ContentPart, ToolCall
from runtime.errors import InvalidRequest

_MEDIA = ("image", "video", "audio", "file")
_ARGUMENTS = msgspec.json.Decoder(dict[str, Any])


def template_messages(
    messages: list[ChatMessage], *, reads_parts: bool, knows_developer: bool
) -> list[dict[str, Any]]:
    """Convert a conversation.

    Args:
        messages: roles are checked already.
        reads_parts: the template walks over content parts; else texts are joined by a space.
        knows_developer: the template has a place for that role; else it reads as `system`, its
            forerunner, because many templates drop a role they do not know without a word.

    Raises:
        InvalidRequest: a part that is no text, or tool-call arguments that are no JSON object.
    """
    return [
        _message(message, f"messages[{index}]", reads_parts, knows_developer)
        for index, message in enumerate(messages)
    ]


def _message(
    message: ChatMessage, where: str, reads_parts: bool, knows_developer: bool
) -> dict[str, Any]:
    role = message.role.lower()
    if role == "developer" and not knows_developer:
        role = "system"
    converted: dict[str, Any] = {}
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        # Templates differ in the name; `transformers` sets both as well.
        converted["thinking"] = reasoning
    converted["role"] = role
    converted["content"] = _content(message, where, reads_parts)
    if reasoning:
        converted["reasoning_content"] = reasoning
    if message.name is not None:
        converted["name"] = message.name
    if message.tool_call_id is not None:
        converted["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        converted["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    return converted


def _content(message: ChatMessage, where: str, reads_parts: bool) -> str | list[dict[str, Any]]:
    content = message.content
    if content is None:
        return message.refusal or ""
    if isinstance(content, str):
        return content
    texts = [_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    if reads_parts:
        return [{"type": "text", "text": text} for text in texts]
    return " ".join(texts)


def _text(part: ContentPart, where: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if any(kind in part.type for kind in _MEDIA):
        raise InvalidRequest(f"{where}: this model takes text only.", param=where)
    raise InvalidRequest(f"{where} must be a text part with its text.", param=where)


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    assert call.function is not None, "settled before"
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = _ARGUMENTS.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise InvalidRequest(
                f"{where}.function.arguments must be a JSON object.",
                param=f"{where}.function.arguments",
            ) from None
    converted: dict[str, Any] = {
        "type": call.type or "function",
        "function": {"name": call.function.name, "arguments": arguments or {}},
    }
    if call.id is not None:
        converted["id"] = call.id
    return converted
