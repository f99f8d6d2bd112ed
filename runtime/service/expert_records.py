"""Starts, stops and writes records of expert use."""

from __future__ import annotations

from typing import Literal

from runtime.client.client import EngineClient
from runtime.errors import InvalidRequest
from runtime.ipc.messages import RecordExperts

# Writing every token of many steps takes a worker a while.
_WRITE_TIMEOUT_S = 300.0


async def record_experts(client: EngineClient, action: Literal["start", "stop", "dump"]) -> str:
    """Send `action` to every rank; returns the first rank's message.

    Raises:
        InvalidRequest: the server was not started with it, or the file cannot be written.
    """
    reply = await client.control(lambda call_id: RecordExperts(call_id, action), _WRITE_TIMEOUT_S)
    if not reply.success:
        raise InvalidRequest(reply.message)
    return reply.message
