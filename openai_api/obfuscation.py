"""Adds random characters to a stream's chunks, so that their sizes do not reveal text lengths."""

from __future__ import annotations

import secrets
from typing import Any

import orjson

# Events are padded to a multiple of this many bytes, which is longer than the text of a token.
_STEP = 32


def obfuscation_of(said: Any) -> str:
    """Return the padding for an event whose text is in the JSON value `said`."""
    # Lists that are encoded while they are sent do not count, because they have numbers, not text.
    missing = -len(orjson.dumps(said, default=lambda _: None)) % _STEP
    return secrets.token_urlsafe(_STEP)[:missing]
