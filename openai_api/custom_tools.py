"""Converts custom tools, which take plain text, to functions with one argument, and back."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from openai_api.schemas.chat import CustomGrammar

_INPUT = "input"
_PARAMETERS = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


def custom_function(
    name: str, description: str | None, grammar: CustomGrammar | None
) -> dict[str, Any]:
    """Return the function that stands for a custom tool.

    Args:
        name: the name of the tool and the function.
        description: a description for the model to read.
        grammar: a grammar that the text should follow. It is shown to the model. A regular
            expression also becomes part of the function's schema, so it is enforced wherever
            schemas are.
    """
    function: dict[str, Any] = {"name": name}
    parts = [part for part in (description, grammar and grammar.definition) if part]
    if parts:
        function["description"] = "\n\n".join(parts)
    if grammar is None or grammar.syntax != "regex":
        return {**function, "parameters": _PARAMETERS}
    text = {"type": "string", "pattern": _whole(grammar.definition)}
    parameters = {**_PARAMETERS, "properties": {_INPUT: text}}
    return {**function, "parameters": parameters, "strict": True}


def _whole(pattern: str) -> str:
    """Return `pattern` with anchors, so that it must match the whole text."""
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and not inner.endswith("\\$"):
        inner = inner[:-1]
    return f"^({inner})$"


def arguments_of(text: str) -> dict[str, str]:
    """Return the function's arguments for a call that gives the custom tool the input `text`."""
    return {_INPUT: text}


def text_of(arguments: str) -> str:
    """Return the text of a call of a custom tool; all of `arguments` if they have another form.

    Args:
        arguments: the function's arguments as JSON, or their beginning if the output was cut.
    """
    try:
        given = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        # An escape in the JSON is a lone surrogate, which is not valid text.
        return arguments
    text = given.get(_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
