"""The status of each replica, and the status of the whole engine that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from runtime.ipc.messages import Phase, WorkerReady
from runtime.ipc.shared_state import SharedState

_ORDER: dict[Phase, int] = {
    phase: at for at, phase in enumerate(("failed", *(p for p in get_args(Phase) if p != "failed")))
}


@dataclass(kw_only=True)
class ReplicaStatus:
    """The status of one replica.

    Attributes:
        rank: index of the replica.
        shared: gauges and heartbeats that the replica's processes write.
        phase: the current phase of the start, or `ready`, or `failed`.
        fraction: progress within `phase`, from 0 to 1.
        detail: the work that `phase` does now, such as `CUDA graphs`; often empty.
        worker: the worker's message that it is ready; `None` before.
        detokenizer_ready: whether the detokenizer is ready.
        num_restarts: number of processes that were restarted.
        last_failure: why the latest process died, or why the first start failed.
        ready_at: when the replica became ready the last time, `time.monotonic()`.
        num_rejected: number of messages to the front process that could not be decoded.
    """

    rank: int = 0
    shared: SharedState
    phase: Phase = "starting"
    fraction: float = 0.0
    detail: str = ""
    worker: WorkerReady | None = None
    detokenizer_ready: bool = False
    num_restarts: int = 0
    last_failure: str | None = None
    ready_at: float | None = None
    num_rejected: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether the replica serves requests."""
        return self.worker is not None and self.detokenizer_ready


class EngineStatus:
    """The status of the engine, combined from the status of its replicas.

    Attributes:
        replicas: status of each replica, in the order of their ranks.
        has_started: whether every replica has been ready once.
        fatal: why the engine has ended; `None` while it runs.
    """

    def __init__(self, replicas: Sequence[ReplicaStatus]) -> None:
        """Combine the status objects of the replicas, which the replicas update."""
        self.replicas = tuple(replicas)
        self.has_started = False
        self.fatal: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether at least one replica serves requests."""
        return self.fatal is None and any(each.is_ready for each in self.replicas)

    @property
    def phase(self) -> Phase:
        """The least advanced phase until all replicas have started; then the most advanced one."""
        return "failed" if self.fatal is not None else self._shown.phase

    @property
    def fraction(self) -> float:
        """Progress within `phase`, from 0 to 1."""
        return self._shown.fraction

    @property
    def detail(self) -> str:
        """The work that `phase` does now, such as `CUDA graphs`; often empty."""
        return self._shown.detail

    @property
    def worker(self) -> WorkerReady | None:
        """The ready message of the first replica whose worker is ready; `None` if none is."""
        return next((each.worker for each in self.replicas if each.worker is not None), None)

    @property
    def num_restarts(self) -> int:
        """Number of processes that were restarted."""
        return sum(each.num_restarts for each in self.replicas)

    @property
    def last_failure(self) -> str | None:
        """Why the engine ended, or why a replica failed; `None` if nothing has failed."""
        failures = (each.last_failure for each in self.replicas)
        return self.fatal or next((each for each in failures if each is not None), None)

    @property
    def _shown(self) -> ReplicaStatus:
        choose = max if self.has_started else min
        return choose(self.replicas, key=lambda each: (_ORDER[each.phase], each.fraction))

    def total(self, gauge: str) -> float:
        """Return the sum of a gauge over all replicas."""
        return sum(each.shared[gauge] for each in self.replicas)
