"""Random characters in a stream's chunks, so that their sizes do not reveal the texts' lengths."""

from __future__ import annotations

import secrets
from typing import Any

import orjson

# Chunks are padded to multiples of this many bytes: tokens are shorter.
_STEP = 32


def obfuscation_of(said: Any) -> str:
    """The padding of a chunk whose content is `said`, a JSON value."""
    # Lists that are encoded in pieces do not count: they are numbers, not text.
    missing = -len(orjson.dumps(said, default=lambda _: None)) % _STEP
    return secrets.token_urlsafe(_STEP)[:missing]
