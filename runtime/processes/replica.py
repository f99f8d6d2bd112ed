"""One replica: starts its worker and its detokenizer, notices when they end, and restarts them.

A dead child affects neither the other replicas nor the front. The replica takes no requests until
its new process is ready. Its requests in flight go on there, or in another replica, as far as
`--max-resumes` allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import zmq

from runtime.client.client import EngineClient
from runtime.client.prefix_index import MAX_TOKENS
from runtime.config.options import DetokenizerConfig, WorkerConfig
from runtime.errors import HeadraceError
from runtime.eventloop.background import Background
from runtime.eventloop.offload import OffloadPool
from runtime.ipc.messages import (
    ControlReply,
    DetokenizerReady,
    FrontInbound,
    Progress,
    RequestError,
    StartupFailed,
    TextDeltas,
    WorkerReady,
)
from runtime.ipc.process import Child, compute_environment, describe_exit
from runtime.ipc.time_messages import RequestTimes
from runtime.ipc.transport import AsyncInbox, Outbox, front_address, scheduler_address
from runtime.processes.status import EngineStatus, ReplicaStatus

logger = logging.getLogger(__name__)

# Delays by the number of deaths in a row, so that a child that dies at once does not restart in a
# busy loop.
RESTART_DELAYS_S = (0.0, 0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_AFTER_S = 60.0
# If a child ends before it has started, its end is handled this much later, after its last message.
LAST_MESSAGE_S = 0.5
# A process that is stopped, or hangs in a driver, cannot write its stacks.
STACKS_WAIT_S = 2.0
_STACKS_PERIOD_S = 0.1

_ENDINGS = OffloadPool("end of child processes", workers=64, max_queued=64, timeout_s=15.0)


async def _stacks_of(child: Child) -> str:
    """Return the stacks of the child's threads that it writes within `STACKS_WAIT_S`."""
    deadline = time.monotonic() + STACKS_WAIT_S
    child.ask_for_stacks()
    found, before = "", None
    while found != before and time.monotonic() < deadline:
        # Wait until the text no longer grows.
        before = found or None
        await asyncio.sleep(_STACKS_PERIOD_S)
        found = child.stacks()
    return found.rstrip()


@dataclasses.dataclass
class _Renewal:
    """A worker that is being replaced on purpose.

    Attributes:
        earlier: the configuration to go back to.
        outcome: why the new worker ended before it was ready; empty if it is ready.
    """

    earlier: WorkerConfig
    outcome: asyncio.Future[str]


class Stoppable(Protocol):
    """A child process, or its owner."""

    def stop(self) -> None:
        """End the process or processes, and wait until they have ended."""
        ...


async def stop_child(child: Stoppable) -> None:
    """End a child without blocking the loop; give up on a child that does not end in time.

    A killed process that still exists is stuck in a driver.
    """
    try:
        await _ENDINGS.run(child.stop)
    except HeadraceError as error:
        logger.error("A child process is left behind: %s", error.message)


class Owner(Protocol):
    """The interface of a replica's owner, the engine.

    Attributes:
        restarts: whether a dead child is started again; otherwise its death ends the engine.
        status: status of the whole engine.
    """

    restarts: bool
    status: EngineStatus

    def changed(self) -> None:
        """Note that the replica's status has changed."""
        ...

    def worker_died(self) -> None:
        """Note that the replica's worker died and will be started again."""
        ...

    def ended(self, why: str) -> None:
        """Note that the replica will not be restarted, so the engine has ended."""
        ...


class Replica:
    """Children, sockets and shared memory of one replica, on the caller's event loop.

    Attributes:
        status: the replica's status, kept current here.
    """

    def __init__(
        self,
        status: ReplicaStatus,
        worker: WorkerConfig,
        detokenizer: DetokenizerConfig,
        client: EngineClient,
        context: zmq.Context[zmq.Socket[bytes]],
        owner: Owner,
        start_child: Callable[..., Child] = Child,
        restart_delays_s: Sequence[float] = RESTART_DELAYS_S,
    ) -> None:
        """Prepare; nothing starts before `start`.

        Args:
            status: status to keep current; its `rank` is this replica's.
            worker: configuration of the scheduler's process, in this replica's run folder.
            detokenizer: configuration of the detokenizer's process, in the same folder.
            client: receives every message and the notice of every death.
            context: the ZMQ context of the sockets.
            owner: notified of every change.
            start_child: starts a process as `Child` does.
            restart_delays_s: seconds to wait after each of several failures in a row.
        """
        self._new_child = start_child
        self._restart_delays_s = restart_delays_s
        self.status = status
        self._client = client
        self._link = client.links[status.rank]
        self._link.max_queued = worker.max_queued_requests
        self._owner = owner
        self._run_folder = Path(worker.run_folder)
        self._worker_config = worker
        self._detokenizer_config = detokenizer
        self._worker: Child | None = None
        self._detokenizer: Child | None = None
        self._context = context
        self._inbox: AsyncInbox[FrontInbound] | None = None
        self._scheduler: Outbox | None = None
        self._background = Background(self._lost)
        self._restarting = asyncio.Lock()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started_at: dict[str, float] = {}
        self._failures: dict[str, int] = {"scheduler": 0, "detokenizer": 0}
        self._renewal: _Renewal | None = None

    def start(self) -> None:
        """Open the sockets and start both children; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._inbox = AsyncInbox(
            self._context, front_address(self._run_folder), FrontInbound, self._count_rejected
        )
        self._background.keep(self._receive, f"Receiving from replica {self.status.rank}")
        self._start_worker()
        self._start_detokenizer()

    async def stop(self) -> None:
        """End the children and close the sockets."""
        self._stopping = True
        self._renewed("The server is stopping.")
        await asyncio.gather(*map(stop_child, self._living()))
        await self._background.stop()
        self._link.ready = False
        if self._inbox is not None:
            self._inbox.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def end_children(self) -> None:
        """End the children without the event loop."""
        self._stopping = True
        for child in (self._worker, self._detokenizer):
            if child is not None:
                child.stop()

    def kill(self, name: str, why: str) -> None:
        """End a `worker` or `detokenizer`; it is restarted like a process that died."""
        logger.error("Ending the %s%s: %s", name, self._whose, why)
        if not self._owner.restarts:
            self._set(last_failure=f"The {name}{self._whose} was ended: {why}.")
        child = self._worker if name == "worker" else self._detokenizer
        if child is not None and child.is_alive:
            child.kill()

    async def kill_stuck(self, name: str, why: str) -> None:
        """Log the stacks of the process's threads, then do what `kill` does."""
        child = self._worker if name == "worker" else self._detokenizer
        if child is None or not child.is_alive:
            return
        stacks = await _stacks_of(child) or f"It wrote no stacks within {STACKS_WAIT_S:g} s."
        logger.error("The %s%s is stuck: %s. Its threads:\n%s", name, self._whose, why, stacks)
        # The process may have ended meanwhile, and its replacement must not be killed.
        if child.is_alive:
            self.kill(name, why)

    def restart_with(self, folder: Path) -> None:
        """Load the weights of `folder` whenever the worker has to be started again."""
        self._worker_config = dataclasses.replace(
            self._worker_config, weights_folder=str(folder), load_format="auto"
        )

    async def renew(self, folder: Path | None) -> str:
        """Replace the worker; its requests go on in the new one.

        Args:
            folder: folder of the weights that the new worker loads; `None` for the weights of the
                present worker.

        Returns:
            Why the new worker could not start; empty if it is ready. After a failure, a worker with
            the earlier weights starts.
        """
        async with self._restarting:
            old = self._worker
            if self._stopping or old is None or not self.status.is_ready:
                return f"The worker{self._whose} is not ready."
            outcome = asyncio.get_running_loop().create_future()
            self._renewal = _Renewal(self._worker_config, outcome)
            # Its end is not a failure.
            self._worker = None
            self._link.ready = False
            why = f"The worker{self._whose} is being replaced."
            self._client.interrupt(self.status.rank, why, keeps_weights=True, counts=False)
            self._set(worker=None, phase="starting", fraction=0.0)
            await stop_child(old)
            if folder is not None:
                self.restart_with(folder)
            if not self._stopping:
                await self._start_another_worker()
        return await outcome

    def _renewed(self, why_not: str = "") -> None:
        """Note that the new worker is ready, or why it is not."""
        renewal, self._renewal = self._renewal, None
        if renewal is None:
            return
        if why_not:
            generation = self._worker_config.generation
            self._worker_config = dataclasses.replace(renewal.earlier, generation=generation)
        renewal.outcome.set_result(why_not)

    def pids(self) -> dict[str, int]:
        """Process ids of the living children."""
        return {child.entry: child.pid for child in self._living()}

    # ---- children ----

    @property
    def _whose(self) -> str:
        """Return text that names the replica if there are several."""
        return f" of replica {self.status.rank}" if len(self._client.links) > 1 else ""

    def _living(self) -> list[Child]:
        both = (self._worker, self._detokenizer)
        return [child for child in both if child is not None and child.is_alive]

    def _start_worker(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        self.status.shared.reset()
        address = scheduler_address(self._run_folder, self._worker_config.generation)
        self._scheduler = Outbox(self._context, address)
        self._link.connect(self._scheduler.send)
        self._started_at["scheduler"] = time.monotonic()
        environment = compute_environment(self._worker_config.num_threads)
        if self._worker_config.gpu_ids:
            # The worker sees only its own GPU, as number 0.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._worker_config.gpu_ids)
        self._worker = self._start_child("scheduler", self._worker_config, environment)

    def _start_detokenizer(self) -> None:
        self._started_at["detokenizer"] = time.monotonic()
        environment = {"TOKENIZERS_PARALLELISM": "false"}
        self._detokenizer = self._start_child("detokenizer", self._detokenizer_config, environment)

    def _start_child(self, entry: str, config: object, environment: dict[str, str]) -> Child:
        # If a death is final, the owner must report the reason, because it may show no log.
        relays = not self._owner.restarts
        return self._new_child(
            entry, config, self._exited_on_thread, environment, relays_stderr=relays
        )

    def _exited_on_thread(self, child: Child, code: int) -> None:
        assert self._loop is not None
        later = self._loop.call_later
        # A busy event loop may learn of the end before it reads the message that says why the child
        # cannot start.
        delay_s = 0.0 if self._owner.status.has_started else LAST_MESSAGE_S
        with contextlib.suppress(RuntimeError):  # raised when the loop is closed
            self._loop.call_soon_threadsafe(later, delay_s, self._exited, child, code)

    def _exited(self, child: Child, code: int) -> None:
        if self._stopping or child not in (self._worker, self._detokenizer):
            return
        why = f"The {child.entry} process{self._whose} {describe_exit(code)}."
        started = self._owner.status.has_started
        if not self._owner.restarts or (child is self._worker and not started):
            self._end(child, code, why)
            return
        logger.error("%s Its requests wait; starting it again.", why)
        self._link.ready = False
        loaded = self._client.loaded
        self._client.interrupt(
            self.status.rank,
            f"{why} It is being restarted.",
            keeps_weights=child is self._detokenizer or loaded.version == loaded.restart_version,
            # While no worker is ready, a detokenizer has nothing that could end it.
            counts=child is self._worker or self.status.worker is not None,
        )
        self._set(last_failure=why, num_restarts=self.status.num_restarts + 1)
        if child is self._worker:
            self._renewed(self.status.last_failure or why)
            self._set(worker=None, phase="starting", fraction=0.0)
            self._owner.worker_died()
        else:
            self._set(detokenizer_ready=False)
        self._background.run(self._restart(child), f"The restart of the {child.entry}{self._whose}")

    def _lost(self, why: str) -> None:
        """End the replica, because one of the front's tasks for it cannot continue."""
        self._link.ready = False
        self._set(phase="failed", last_failure=why, worker=None)
        self._owner.ended(why)

    def _end(self, child: Child, code: int, why: str) -> None:
        words = child.last_words
        text = self.status.last_failure or why
        if code == -signal.SIGKILL:
            text += " A system that runs out of memory ends processes this way."
        text = f"{text} Its last words:\n{words}" if words else text
        self._link.ready = False
        self._set(phase="failed", last_failure=text, worker=None)
        self._owner.ended(text)

    async def _restart(self, child: Child) -> None:
        name = child.entry
        lived_s = time.monotonic() - self._started_at[name]
        self._failures[name] = 0 if lived_s > STABLE_AFTER_S else self._failures[name] + 1
        await self._wait_after_failures(name)
        # Restarts run one after the other: both children may have died, and the new ones may die at
        # once.
        async with self._restarting:
            if self._stopping:
                return
            if child is self._worker:
                await self._start_another_worker()
            elif child is self._detokenizer:
                # The living worker still runs the requests under their earlier ids.
                self._client.stop_orphans(self.status.rank)
                await self._replace_detokenizer()
            # Else the worker's restart has already replaced this detokenizer.

    async def _start_another_worker(self) -> None:
        # Every restart uses new addresses, so messages for the dead process cannot arrive.
        self._client.loaded.restarted()
        generation = self._worker_config.generation + 1
        self._worker_config = dataclasses.replace(self._worker_config, generation=generation)
        await self._start_in_time(self._start_worker, "scheduler")
        await self._replace_detokenizer()

    async def _replace_detokenizer(self) -> None:
        # Each child has the other's address, so both change generation together.
        old = self._detokenizer
        self._detokenizer = None
        self._set(detokenizer_ready=False)
        if old is not None and old.is_alive:
            await stop_child(old)
        self._detokenizer_config = dataclasses.replace(
            self._detokenizer_config,
            generation=self._worker_config.generation,
            scheduler_generation=self._worker_config.generation,
        )
        await self._start_in_time(self._start_detokenizer, "detokenizer")

    async def _start_in_time(self, start: Callable[[], None], name: str) -> None:
        """Start a child now, or as soon as the system has a free process and memory for it."""
        while not self._stopping:
            try:
                start()
                return
            except (OSError, RuntimeError) as error:
                logger.error("The %s%s cannot be started: %s", name, self._whose, error)
                self._failures[name] += 1
                await self._wait_after_failures(name)

    async def _wait_after_failures(self, name: str) -> None:
        delays_s = self._restart_delays_s
        await asyncio.sleep(delays_s[min(self._failures[name], len(delays_s) - 1)])

    # ---- messages ----

    async def _receive(self) -> None:
        assert self._inbox is not None
        while True:
            message = await self._inbox.receive()
            try:
                self._dispatch(message)
            except Exception:
                logger.exception("A message of kind %s failed", type(message).__name__)

    def _dispatch(self, message: FrontInbound) -> None:
        match message:
            case TextDeltas():
                self._client.on_deltas(message)
            case RequestError():
                self._client.on_request_error(message)
            case RequestTimes():
                self._client.history.on_times(message.ended)
            case ControlReply():
                self._client.calls.on_reply(self.status.rank, message)
            case Progress():
                self._set(phase=message.phase, fraction=message.fraction, detail=message.detail)
            # A dead worker's message may be read late.
            case WorkerReady() if _is_from(self._worker, message.pid):
                self._link.prefixes.max_tokens = min(message.max_total_num_tokens, MAX_TOKENS)
                self._link.num_rows = message.max_running_requests
                self._set(worker=message)
                self._client.repeat_options(self.status.rank)
                self._became_ready()
            case DetokenizerReady() if _is_from(self._detokenizer, message.pid):
                self._set(detokenizer_ready=True)
                self._became_ready()
            case StartupFailed():
                self._set(phase="failed", last_failure=message.message)

    def _became_ready(self) -> None:
        if self.status.is_ready:
            self._link.ready = True
            self._set(phase="ready", fraction=1.0, ready_at=time.monotonic())
            self._client.resume()
            self._renewed()

    def _count_rejected(self, count: int) -> None:
        self.status.num_rejected = count

    def _set(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self.status, name, value)
        self._owner.changed()


def _is_from(child: Child | None, pid: int) -> bool:
    return child is not None and child.is_alive and child.pid == pid
