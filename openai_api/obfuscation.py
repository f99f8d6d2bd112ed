"""Random characters in the chunks of a stream: their sizes do not tell how long its texts are."""

from __future__ import annotations

import secrets
from typing import Any

import orjson

# What is said fills steps of this many bytes: tokens are shorter.
_STEP = 32


def obfuscation_of(said: Any) -> str:
    """What makes a chunk that says `said`, JSON, as long as others."""
    # Numbers that come in pieces are no text.
    missing = -len(orjson.dumps(said, default=lambda _: None)) % _STEP
    return secrets.token_urlsafe(_STEP)[:missing]
