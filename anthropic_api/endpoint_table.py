"""The Messages routes: a table of endpoints."""

from __future__ import annotations

from anthropic_api.message_answers import (
    AnthropicErrorBody,
    BlockDelta,
    BlockStart,
    BlockStop,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    TokenTotal,
)
from anthropic_api.message_request import BLOCKS, CountTokensRequest, MessagesRequest
from openai_api.routes import Endpoint
from runtime.service.operation import events_of, json_of, operation

_EVENTS = (
    MessageStart,
    Ping,
    BlockStart,
    BlockDelta,
    BlockStop,
    MessageDelta,
    MessageStop,
    AnthropicErrorBody,
)

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/messages",
        "anthropic_api.messages:create_message",
        "Answer a conversation, in Anthropic's format",
        operation(
            MessagesRequest,
            ok={**json_of(MessageAnswer), **events_of(*_EVENTS)},
            mentions=BLOCKS,
        ),
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        "anthropic_api.messages:count_tokens",
        "Count the tokens of a conversation",
        operation(CountTokensRequest, ok=json_of(TokenTotal), mentions=BLOCKS),
    ),
)
