"""Encodes the events of Anthropic's streams; an event's name is its payload's `type`."""

from __future__ import annotations

from anthropic_api.message_answers import AnthropicErrorBody, MessageEvent
from runtime.service.generation import Chunk, named_event


def message_event(content: MessageEvent | AnthropicErrorBody) -> Chunk:
    """Encode `content` as one server-sent event."""
    return named_event(content["type"], content)
