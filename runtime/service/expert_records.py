"""Starts, stops and writes records of expert use."""

from __future__ import annotations

from typing import Literal

from runtime.client.client import EngineClient
from runtime.errors import InvalidRequest
from runtime.ipc.messages import RecordExperts

# A worker needs some time to write every token of many steps.
_WRITE_TIMEOUT_S = 300.0


async def record_experts(client: EngineClient, action: Literal["start", "stop", "dump"]) -> str:
    """Send `action` to every rank; return the first rank's message.

    Raises:
        InvalidRequest: the server was started without recording, or the file cannot be written.
    """
    reply = await client.calls.control(
        lambda call_id: RecordExperts(call_id, action), _WRITE_TIMEOUT_S
    )
    if not reply.success:
        raise InvalidRequest(reply.message)
    return reply.message
