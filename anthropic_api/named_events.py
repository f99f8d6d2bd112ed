"""Server-sent events that carry their name on a line of its own."""

from __future__ import annotations

from typing import cast

import orjson

from anthropic_api.message_answers import AnthropicErrorBody, MessageEvent


def named_event(content: MessageEvent | AnthropicErrorBody) -> bytes:
    """One event; its name is the payload's `type`."""
    name = cast("str", content["type"]).encode()
    return b"event: " + name + b"\ndata: " + orjson.dumps(content) + b"\n\n"
