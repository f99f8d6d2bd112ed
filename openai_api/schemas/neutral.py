"""Fields that are accepted and do not change an answer; each has a reason."""

from __future__ import annotations

import msgspec

_KEY = "neutral"


def neutral(why: str) -> msgspec.Meta:
    """Mark a field that has no effect here; `why` is the reason."""
    return msgspec.Meta(description=f"No effect here: {why}.", extra={_KEY: why})


def neutral_fields(body: type[msgspec.Struct]) -> dict[str, str]:
    """The neutral fields of `body`, each with its reason."""
    found = {}
    for field in msgspec.structs.fields(body):
        for note in getattr(field.type, "__metadata__", ()):
            if isinstance(note, msgspec.Meta) and note.extra and _KEY in note.extra:
                found[field.name] = note.extra[_KEY]
    return found
