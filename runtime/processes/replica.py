"""One replica: starts its worker and its detokenizer, notices when they die, and restarts them.

If one of these processes dies, the other replicas and the front process continue. This replica
takes no requests until the new process is ready. Its requests continue there or in another replica,
at most as often as `--max-resumes` allows.
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

# Delay before a restart, by the number of deaths in a row. So a process that dies at once is not
# restarted in a busy loop.
RESTART_DELAYS_S = (0.0, 0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_AFTER_S = 60.0
# If a process ends before it was ready, this is handled later by this time, so that its last
# message is read first.
LAST_MESSAGE_S = 0.5
# Time to wait for stacks, seconds. A process that is stopped, or hangs in a driver, writes none.
STACKS_WAIT_S = 2.0
_STACKS_PERIOD_S = 0.1

_ENDINGS = OffloadPool("end of child processes", workers=64, max_queued=64, timeout_s=15.0)


async def _stacks_of(child: Child) -> str:
    """Return the stacks of a process's threads, as far as it writes them in `STACKS_WAIT_S`."""
    deadline = time.monotonic() + STACKS_WAIT_S
    child.ask_for_stacks()
    found, before = "", None
    while found != before and time.monotonic() < deadline:
        # The text is complete when it no longer grows.
        before = found or None
        await asyncio.sleep(_STACKS_PERIOD_S)
        found = child.stacks()
    return found.rstrip()


@dataclasses.dataclass
class _Renewal:
    """A planned replacement of a worker that is in progress.

    Attributes:
        earlier: the configuration to restore if the new worker fails.
        outcome: why the new worker ended before it was ready; empty when it is ready.
    """

    earlier: WorkerConfig
    outcome: asyncio.Future[str]


class Stoppable(Protocol):
    """A child process, or an object that has child processes."""

    def stop(self) -> None:
        """End the process or processes, and wait until they have ended."""
        ...


async def stop_child(child: Stoppable) -> None:
    """End a child process without blocking the event loop.

    A process that does not end in time is left behind, with an error in the log. Such a process was
    killed and still exists, so it hangs in a driver.
    """
    try:
        await _ENDINGS.run(child.stop)
    except HeadraceError as error:
        logger.error("A child process is left behind: %s", error.message)


class Owner(Protocol):
    """The methods and attributes of the engine that a replica uses.

    Attributes:
        restarts: whether a process that dies is started again; if not, its death ends the engine.
        status: status of the whole engine.
    """

    restarts: bool
    status: EngineStatus

    def changed(self) -> None:
        """Handle a change of the replica's status."""
        ...

    def worker_died(self) -> None:
        """Handle the death of the replica's worker, which is started again."""
        ...

    def ended(self, why: str) -> None:
        """Handle the end of the replica, which is not restarted; this ends the engine."""
        ...


class Replica:
    """The processes, sockets and shared memory of one replica, on the caller's event loop.

    Attributes:
        status: the replica's status, which this object updates.
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
        """Store the parts; `start` starts the processes.

        Args:
            status: the status to update; its `rank` is the index of this replica.
            worker: configuration of the worker process, with this replica's run folder.
            detokenizer: configuration of the detokenizer process, with the same folder.
            client: receives all messages, and is told when a process dies.
            context: the ZMQ context of the sockets.
            owner: the engine, which is told of every change.
            start_child: starts a process as `Child` does.
            restart_delays_s: seconds to wait before a restart, by the number of failures in a row.
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
        """Open the sockets and start both processes, without waiting until they are ready."""
        self._loop = asyncio.get_running_loop()
        self._inbox = AsyncInbox(
            self._context, front_address(self._run_folder), FrontInbound, self._count_rejected
        )
        self._background.keep(self._receive, f"Receiving from replica {self.status.rank}")
        self._start_worker()
        self._start_detokenizer()

    async def stop(self) -> None:
        """End the processes and close the sockets."""
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
        """End the processes without the event loop."""
        self._stopping = True
        for child in (self._worker, self._detokenizer):
            if child is not None:
                child.stop()

    def kill(self, name: str, why: str) -> None:
        """Kill the `worker` or `detokenizer`; it is restarted as after any death."""
        logger.error("Ending the %s%s: %s", name, self._whose, why)
        if not self._owner.restarts:
            self._set(last_failure=f"The {name}{self._whose} was ended: {why}.")
        child = self._worker if name == "worker" else self._detokenizer
        if child is not None and child.is_alive:
            child.kill()

    async def kill_stuck(self, name: str, why: str) -> None:
        """Log the stacks of a process's threads, then kill it; see `kill`."""
        child = self._worker if name == "worker" else self._detokenizer
        if child is None or not child.is_alive:
            return
        stacks = await _stacks_of(child) or f"It wrote no stacks within {STACKS_WAIT_S:g} s."
        logger.error("The %s%s is stuck: %s. Its threads:\n%s", name, self._whose, why, stacks)
        # If the process has ended meanwhile, its replacement must not be killed.
        if child.is_alive:
            self.kill(name, why)

    def restart_with(self, folder: Path) -> None:
        """Load the weights of `folder` in every worker that is started from now on."""
        self._worker_config = dataclasses.replace(
            self._worker_config, weights_folder=str(folder), load_format="auto"
        )

    async def renew(self, folder: Path | None) -> str:
        """Replace the worker; its requests continue in the new one.

        Args:
            folder: folder of the weights for the new worker; `None` for the current weights.

        Returns:
            Why the new worker could not start; empty if it is ready. After a failure, a worker with
            the earlier weights is started.
        """
        async with self._restarting:
            old = self._worker
            if self._stopping or old is None or not self.status.is_ready:
                return f"The worker{self._whose} is not ready."
            outcome = asyncio.get_running_loop().create_future()
            self._renewal = _Renewal(self._worker_config, outcome)
            # With this, the end of the old worker is not treated as a death.
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
        """End a replacement of the worker: it is ready, or `why_not` says why it is not."""
        renewal, self._renewal = self._renewal, None
        if renewal is None:
            return
        if why_not:
            generation = self._worker_config.generation
            self._worker_config = dataclasses.replace(renewal.earlier, generation=generation)
        renewal.outcome.set_result(why_not)

    def pids(self) -> dict[str, int]:
        """Return the ids of the living processes by name."""
        return {child.entry: child.pid for child in self._living()}

    # ---- children ----

    @property
    def _whose(self) -> str:
        """Text that names the replica in messages; empty if there is only one."""
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
            # The worker sees only its own GPUs, numbered from 0.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._worker_config.gpu_ids)
        self._worker = self._start_child("scheduler", self._worker_config, environment)

    def _start_detokenizer(self) -> None:
        self._started_at["detokenizer"] = time.monotonic()
        environment = {"TOKENIZERS_PARALLELISM": "false"}
        self._detokenizer = self._start_child("detokenizer", self._detokenizer_config, environment)

    def _start_child(self, entry: str, config: object, environment: dict[str, str]) -> Child:
        # Without restarts the engine reports the child's last output, because there may be no
        # visible log.
        relays = not self._owner.restarts
        return self._new_child(
            entry, config, self._exited_on_thread, environment, relays_stderr=relays
        )

    def _exited_on_thread(self, child: Child, code: int) -> None:
        assert self._loop is not None
        later = self._loop.call_later
        # A busy event loop may be told of the end before it reads the message which says why the
        # process cannot start.
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
            # While no worker is ready, the requests cannot have caused a detokenizer's death.
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
        """End the replica, because a background task of the front process for it has failed."""
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
        # Restarts run one after the other, because both processes may have died, and the new ones
        # may die at once.
        async with self._restarting:
            if self._stopping:
                return
            if child is self._worker:
                await self._start_another_worker()
            elif child is self._detokenizer:
                # The living worker still has the requests under their earlier ids.
                self._client.stop_orphans(self.status.rank)
                await self._replace_detokenizer()
            # Otherwise the restart of the worker has replaced this detokenizer already.

    async def _start_another_worker(self) -> None:
        # Every restart uses new addresses, so that messages for the dead process cannot arrive.
        self._client.loaded.restarted()
        generation = self._worker_config.generation + 1
        self._worker_config = dataclasses.replace(self._worker_config, generation=generation)
        await self._start_in_time(self._start_worker, "scheduler")
        await self._replace_detokenizer()

    async def _replace_detokenizer(self) -> None:
        # Each of the two processes has the other's address, so both addresses change together.
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
        """Start a process; if the system lacks memory or processes for it, try again later."""
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
            # A message of a dead worker may be read late.
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
