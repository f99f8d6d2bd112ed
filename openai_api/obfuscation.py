"""Adds random characters to a stream's chunks, so that their sizes do not reveal text lengths."""

from __future__ import annotations

import secrets
from typing import Any

import orjson

# Chunks are padded to multiples of this many bytes: tokens are shorter.
_STEP = 32


def obfuscation_of(said: Any) -> str:
    """Return the padding of a chunk whose content is the JSON value `said`."""
    # Lists that are encoded in pieces are not counted: they hold numbers, not text.
    missing = -len(orjson.dumps(said, default=lambda _: None)) % _STEP
    return secrets.token_urlsafe(_STEP)[:missing]
