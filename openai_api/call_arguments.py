"""A call's arguments as an object, for wires that do not tell them as text."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json


def arguments_object(text: str) -> dict[str, Any]:
    """The object; of one that the output breaks off in, what is complete.

    Args:
        text: JSON, as a tool-call parser hands it on.
    """
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        # Nothing yet, or half a surrogate pair: JSON, but no text.
        return {}
    return found if isinstance(found, dict) else {}
