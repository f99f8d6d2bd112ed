"""Starts, stops and writes the record of which experts (MoE) the tokens were routed to."""

from __future__ import annotations

from typing import Literal

from runtime.client.client import EngineClient
from runtime.errors import InvalidRequest
from runtime.ipc.messages import RecordExperts

# Seconds. Writing every token of many steps to a file takes a worker some time.
_WRITE_TIMEOUT_S = 300.0


async def record_experts(client: EngineClient, action: Literal["start", "stop", "dump"]) -> str:
    """Send `action` to every rank of every worker; return the first rank's message.

    Raises:
        InvalidRequest: the server was started without recording, or the file cannot be written.
    """
    reply = await client.calls.control(
        lambda call_id: RecordExperts(call_id, action), _WRITE_TIMEOUT_S
    )
    if not reply.success:
        raise InvalidRequest(reply.message)
    return reply.message
