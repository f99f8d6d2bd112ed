"""Marks fields that are accepted although they have no effect, each with the reason."""

from __future__ import annotations

import msgspec

_KEY = "neutral"


def neutral(why: str) -> msgspec.Meta:
    """Mark a field as having no effect here; `why` is the reason."""
    return msgspec.Meta(description=f"No effect here: {why}.", extra={_KEY: why})


def neutral_fields(body: type[msgspec.Struct]) -> dict[str, str]:
    """Return the fields of `body` that have no effect, each with the reason."""
    found = {}
    for field in msgspec.structs.fields(body):
        for note in getattr(field.type, "__metadata__", ()):
            if isinstance(note, msgspec.Meta) and note.extra and _KEY in note.extra:
                found[field.name] = note.extra[_KEY]
    return found
