"""Finds whether the server is alive and ready, from shared memory, so that no probe must queue."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from runtime.client.weight_gate import PAUSE, SESSION, UPDATE
from runtime.processes.engine_processes import still_for, stuck_for
from runtime.processes.status import ReplicaStatus
from runtime.service.context import ServiceContext

# Seconds: longer than any step of a healthy worker on a GPU, shorter than a client waits.
READY_HEARTBEAT_AGE_S = 10.0


class ProgressReport(TypedDict):
    """Phase and progress of the server; `reason` is set if it is not ready."""

    ready: bool
    phase: str
    progress: float
    detail: str
    num_restarts: int
    reason: NotRequired[str]
    last_failure: NotRequired[str]


def why_not_alive(context: ServiceContext) -> str | None:
    """Return why this process should be replaced; `None` if it should not.

    A worker that loads or restarts is not a reason, because replacing the server would not help. A
    worker that hangs is not a reason as long as another replica runs.
    """
    if context.status.phase == "failed":
        what = "has ended" if context.status.has_started else "failed to start"
        return f"The engine {what}: {context.status.last_failure}"
    age, name = min(stuck_for(context.client, replica) for replica in context.status.replicas)
    if age > context.config.logging.watchdog_timeout:
        return f"The loop of the {name} has not run for {age:.0f} s."
    return None


def why_not_ready(context: ServiceContext) -> str | None:
    """Return why requests should be sent elsewhere for now; `None` if they are accepted."""
    return why_not_healthy(context) or why_waiting(context)


def why_waiting(context: ServiceContext) -> str | None:
    """Return why requests wait for a trainer to resume the server; `None` if they do not."""
    client = context.client
    if PAUSE in client.gate.reasons:
        return "Generation is paused."
    if SESSION in client.gate.reasons:
        return "A weight update has begun and not ended."
    waited_s = client.gate.closed_for_s(UPDATE)
    if waited_s > READY_HEARTBEAT_AGE_S:
        return f"Requests have waited for new weights for {waited_s:.0f} s."
    return client.loaded.why_refused


def why_not_healthy(context: ServiceContext) -> str | None:
    """Return why requests cannot be served; `None` if they can. A pause is not counted.

    After the start, one replica that accepts requests is enough.
    """
    if context.lifecycle.draining:
        return "The server is shutting down."
    if not context.status.is_ready:
        return f"The engine is {context.status.phase.replace('_', ' ')}."
    if not context.lifecycle.warmed_up:
        return "The first request of the warm-up is running."
    reasons = [_why_replica_not_ready(context, each) for each in context.status.replicas]
    return None if None in reasons else reasons[0]


def _why_replica_not_ready(context: ServiceContext, replica: ReplicaStatus) -> str | None:
    if not replica.is_ready:
        return f"The worker is {replica.phase.replace('_', ' ')}."
    age, name = still_for(replica)
    if age > READY_HEARTBEAT_AGE_S:
        return f"The loop of the {name} has not run for {age:.0f} s."
    most = context.max_queued_requests
    if most and replica.shared["num_queue_reqs"] >= most:
        return "The request queue is full."
    return None


def progress_report(context: ServiceContext) -> ProgressReport:
    """Return phase and progress of the server, for users and for probes."""
    status = context.status
    reason = why_not_ready(context)
    phase = status.phase
    if status.is_ready:
        phase = "ready" if context.lifecycle.warmed_up else "warming_up"
    report: ProgressReport = {
        "ready": reason is None,
        "phase": "draining" if context.lifecycle.draining else phase,
        "progress": round(status.fraction, 3),
        "detail": status.detail,
        "num_restarts": status.num_restarts,
    }
    if reason is not None:
        report["reason"] = reason
    if status.last_failure is not None:
        report["last_failure"] = status.last_failure
    return report
