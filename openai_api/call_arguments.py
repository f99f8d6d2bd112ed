"""The arguments of tool calls: the text that a model writes, and the JSON object that it means."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from pydantic_core import from_json

from openai_api.json_scan import MAX_DEPTH, JsonValue
from runtime.errors import InvalidRequest

_ANY = msgspec.json.Decoder(Any)


class WrittenArguments(dict[str, Any]):
    """A call's arguments as an object that also keeps the text it was decoded from.

    Attributes:
        text: the text as the client sent it, for chat templates that need text.
    """

    def __init__(self, arguments: dict[str, Any], text: str) -> None:
        """Copy the entries of `arguments`."""
        super().__init__(arguments)
        self.text = text


def told_arguments(told: object) -> dict[str, Any] | str:
    """Return the arguments of an earlier call for a chat template: an object, or else their text.

    The text may not be a JSON object, because a model may write anything and its output may be cut.
    Such a text is rendered as it is, so that a conversation with it is not refused.

    Args:
        told: the request's field, which may be any JSON value. None means an empty object.
    """
    if isinstance(told, dict):
        return told
    if told is None:
        return {}
    if not isinstance(told, str):
        return arguments_text(told)
    if not told.strip():
        return {}
    try:
        found = _ANY.decode(told)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return told
    if found is None:
        return {}
    return WrittenArguments(found, told) if isinstance(found, dict) else told


def told_text(told: object) -> str:
    """Return the plain-text input of an earlier call of a custom tool; other values become JSON."""
    if isinstance(told, str):
        return told
    return "" if told is None else arguments_text(told)


def arguments_text(arguments: object) -> str:
    """Return arguments as JSON text: the original text if it is known.

    Raises:
        InvalidRequest: the arguments nest too deep.
    """
    if isinstance(arguments, WrittenArguments):
        return arguments.text
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("The arguments of a call nest too deep.") from None


class ObjectText:
    """Completes the text of a call's arguments to a valid JSON object, for clients that need one.

    Text is passed on as long as it is the beginning of a JSON value that is not nested too deeply.
    From the first character that violates this, the rest of the text becomes one JSON string.
    """

    def __init__(self) -> None:
        """Begin with no text."""
        self._value = JsonValue(MAX_DEPTH)
        self._rest: list[str] = []

    def feed(self, text: str) -> str:
        """Add more of the arguments' text; return the part that can be sent now."""
        end = self._value.feed(text)
        if self._value.is_broken:
            self._rest.append(text[end:])
        return text[:end]

    def finish(self) -> str:
        """End the arguments; return the text that completes the JSON."""
        return self._value.ending_with("".join(self._rest)) if self._value.is_broken else ""


def arguments_object(text: str) -> dict[str, Any]:
    """Return arguments as an object; text that is not valid JSON is completed by `ObjectText`.

    If the text was cut, the object has only the complete part of it.

    Args:
        text: the arguments, as a tool-call parser returns them.
    """
    told = ObjectText()
    try:
        found = from_json(told.feed(text) + told.finish(), allow_partial=True)
    except ValueError:
        # The text is empty, or an escape in it is a lone surrogate, which is not valid text.
        return {}
    return found if isinstance(found, dict) else {}
