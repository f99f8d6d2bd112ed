"""The arguments of calls: the text that a model writes, and the object that some clients read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from pydantic_core import from_json

from openai_api.json_scan import MAX_DEPTH, JsonValue
from runtime.errors import InvalidRequest

_ANY = msgspec.json.Decoder(Any)


class WrittenArguments(dict[str, Any]):
    """Arguments as an object that keeps the text from which they were read.

    Attributes:
        text: the text as the client sent it, for templates that read text.
    """

    def __init__(self, arguments: dict[str, Any], text: str) -> None:
        """Copy the entries of `arguments`."""
        super().__init__(arguments)
        self.text = text


def told_arguments(told: object) -> dict[str, Any] | str:
    """Return an earlier call's arguments as a template reads them: an object or their text.

    A model may have written no object, or its output may have ended inside one. Earlier turns are
    rendered as they are and never refused.

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
    """Return the text of an earlier call of a tool with plain text; see `told_arguments`."""
    if isinstance(told, str):
        return told
    return "" if told is None else arguments_text(told)


def arguments_text(arguments: object) -> str:
    """Return arguments as JSON: the original text if it is known.

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
    """Converts arguments to a JSON object or its beginning, for clients that need one.

    If a model's text stops being JSON, or nests deeper than clients read, the rest of the text
    becomes a string in that place.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._value = JsonValue(MAX_DEPTH)
        self._rest: list[str] = []

    def feed(self, text: str) -> str:
        """Add more of the arguments; return the new part of the JSON."""
        end = self._value.feed(text)
        if self._value.is_broken:
            self._rest.append(text[end:])
        return text[:end]

    def finish(self) -> str:
        """End the arguments; return the text that was held back."""
        return self._value.ending_with("".join(self._rest)) if self._value.is_broken else ""


def arguments_object(text: str) -> dict[str, Any]:
    """Return the object that `ObjectText` writes; if the output ended inside, its complete part.

    Args:
        text: the arguments, as a tool-call parser returns them.
    """
    told = ObjectText()
    try:
        found = from_json(told.feed(text) + told.finish(), allow_partial=True)
    except ValueError:
        # The text is empty, or is JSON with half a surrogate pair, which is not valid text.
        return {}
    return found if isinstance(found, dict) else {}
