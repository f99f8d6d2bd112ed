"""Encodes thoughts and summaries as opaque strings, which clients store and send back.

The strings are not encrypted: a client has seen the thoughts, and may see the summary.
"""

from __future__ import annotations

import base64
import binascii
from typing import Literal

Kind = Literal["thought", "summary"]


def wrapped(kind: Kind, text: str) -> str:
    """Return `text`, a thought or a summary, as an opaque string for the client."""
    return base64.b64encode(_mark(kind) + text.encode("utf-8", "surrogatepass")).decode()


def unwrapped(kind: Kind, kept: str) -> str | None:
    """Return the text in the opaque string `kept`; None for another kind or another server's."""
    try:
        data = base64.b64decode(kept, validate=True)
    except (binascii.Error, ValueError):
        return None
    mark = _mark(kind)
    return data.removeprefix(mark).decode("utf-8", "replace") if data.startswith(mark) else None


def _mark(kind: Kind) -> bytes:
    return f"headrace-{kind}:".encode()
