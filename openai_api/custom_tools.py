"""Tools that are called with plain text: for a model, functions with one argument."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

_INPUT = "input"
_PARAMETERS = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


def custom_function(name: str, description: str | None, definition: str | None) -> dict[str, Any]:
    """The function that stands for such a tool.

    Args:
        name: of both.
        description: for the model to read.
        definition: of the grammar that the text should follow; the model reads it as well.
    """
    function: dict[str, Any] = {"name": name}
    if parts := [part for part in (description, definition) if part]:
        function["description"] = "\n\n".join(parts)
    return {**function, "parameters": _PARAMETERS}


def arguments_of(text: str) -> dict[str, str]:
    """The function's arguments for a call with `text`."""
    return {_INPUT: text}


def text_of(arguments: str) -> str:
    """The text that the function is called with; all of its JSON where it has another form.

    Args:
        arguments: JSON, or the beginning of it where the output broke off.
    """
    try:
        given = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        # Half a surrogate pair: JSON, but no text.
        return arguments
    text = given.get(_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
