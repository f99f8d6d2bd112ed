"""Fields that are taken and change nothing about an answer; each says why that is no loss."""

from __future__ import annotations

import msgspec

_KEY = "neutral"


def neutral(why: str) -> msgspec.Meta:
    """Mark a field as one that has no effect here, because of `why`."""
    return msgspec.Meta(description=f"No effect here: {why}.", extra={_KEY: why})


def neutral_fields(body: type[msgspec.Struct]) -> dict[str, str]:
    """Why each field of `body` that is marked so has no effect, by its name."""
    found = {}
    for field in msgspec.structs.fields(body):
        for note in getattr(field.type, "__metadata__", ()):
            if isinstance(note, msgspec.Meta) and note.extra and _KEY in note.extra:
                found[field.name] = note.extra[_KEY]
    return found
