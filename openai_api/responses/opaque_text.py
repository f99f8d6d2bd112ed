"""Texts that clients keep for us without reading them: thoughts, and summaries of conversations.

They are not secret, only opaque: the client has seen the one, and may see the other.
"""

from __future__ import annotations

import base64
import binascii
from typing import Literal

Kind = Literal["thought", "summary"]


def wrapped(kind: Kind, text: str) -> str:
    """What a client keeps."""
    return base64.b64encode(_mark(kind) + text.encode("utf-8", "surrogatepass")).decode()


def unwrapped(kind: Kind, kept: str) -> str | None:
    """The text again; None where it is of another kind, or another server's."""
    try:
        data = base64.b64decode(kept, validate=True)
    except (binascii.Error, ValueError):
        return None
    mark = _mark(kind)
    return data.removeprefix(mark).decode("utf-8", "replace") if data.startswith(mark) else None


def _mark(kind: Kind) -> bytes:
    return f"headrace-{kind}:".encode()
