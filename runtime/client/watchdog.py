"""Ends a worker or detokenizer that hangs, and says for how long one has stood still."""

from __future__ import annotations

import asyncio
import time

from runtime.client.client import EngineClient
from runtime.client.host import EngineHost
from runtime.client.status import ReplicaStatus

_PERIOD_S = 1.0


def still_for(replica: ReplicaStatus) -> tuple[float, str]:
    """Seconds since the last turn of the slower child, since all were ready at most; its name."""
    age, name = replica.shared.oldest_beat()
    now = time.monotonic()
    return min(age, now - (replica.ready_at or now)), name


def stuck_for(client: EngineClient, replica: ReplicaStatus) -> tuple[float, str]:
    """Like `still_for` while there is work; 0 seconds when there is none, or the worker loads."""
    # A worker that froze while idle never says that it has work; our own requests do.
    in_flight = client.links[replica.rank].num_in_flight
    has_work = replica.is_ready and (replica.shared["has_work"] or in_flight)
    return still_for(replica) if has_work else (0.0, "")


async def watch(host: EngineHost, timeout_s: float) -> None:
    """End a worker or detokenizer whose loop stands still so long although there is work."""
    while True:
        await asyncio.sleep(_PERIOD_S)
        for replica in host.status.replicas:
            stuck_s, name = stuck_for(host.client, replica)
            if stuck_s > timeout_s:
                why = f"no turn of its loop for {stuck_s:.0f} s while requests wait"
                await host.kill_stuck(replica.rank, name, why)
