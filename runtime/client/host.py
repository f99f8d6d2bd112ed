"""The owner of the child processes: starts them, notices their end, starts them again.

A dead worker or detokenizer never takes the front along: requests in flight get a final error, the
port stays open, readiness turns false until the new process is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from runtime.client.client import EngineClient
from runtime.client.grammars import GrammarCompiler
from runtime.config import DetokenizerConfig, GrammarConfig, WorkerConfig
from runtime.errors import StartupError
from runtime.messages import (
    ControlReply,
    DetokenizerReady,
    FrontInbound,
    GrammarReply,
    Phase,
    Progress,
    RequestError,
    StartupFailed,
    TextDeltas,
    WorkerReady,
)
from runtime.process import Child, describe_exit
from runtime.shared_state import SharedState
from runtime.transport import AsyncInbox, Outbox, front_address, scheduler_address

logger = logging.getLogger(__name__)

SHARED_STATE_FILE = "state"
# A child that dies at once every time must not be restarted in a busy loop.
RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_AFTER_S = 60.0


@dataclass
class EngineStatus:
    """Where the engine is in its life.

    Attributes:
        fraction: progress within `phase`, 0 to 1.
        worker: what the worker told of itself once ready; `None` while there is none.
        num_restarts: children started again since the beginning.
        last_failure: why the last child died or the first start failed.
        ready_at: `time.monotonic()` of the latest ready.
    """

    phase: Phase = "starting"
    fraction: float = 0.0
    detail: str = ""
    worker: WorkerReady | None = None
    detokenizer_ready: bool = False
    num_restarts: int = 0
    last_failure: str | None = None
    ready_at: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self.worker is not None and self.detokenizer_ready


class EngineHost:
    """Children, sockets and shared memory of one engine, on the caller's event loop."""

    def __init__(
        self,
        worker: WorkerConfig,
        detokenizer: DetokenizerConfig,
        client: EngineClient,
        run_folder: Path,
        *,
        grammar: GrammarConfig | None = None,
        restarts: bool = True,
    ) -> None:
        """Prepare; nothing starts before `start`.

        Args:
            worker: configuration of the scheduler's process.
            detokenizer: configuration of the detokenizer's process.
            client: told of every message and every death.
            run_folder: private, removed by `stop`.
            grammar: configuration of the grammar compiler's process, `None` for none.
            restarts: start a dead child again. Else its death ends the engine: `status.phase`
                becomes `failed` and `status.last_failure` holds the child's last words.
        """
        self.client = client
        self._restarts = restarts
        self.status = EngineStatus()
        self.on_change: list[Callable[[EngineStatus], None]] = []
        self.run_folder = run_folder
        self.shared = SharedState(run_folder / SHARED_STATE_FILE, create=True)
        self._worker_config = worker
        self._detokenizer_config = detokenizer
        self._worker: Child | None = None
        self._detokenizer: Child | None = None
        self._context = zmq.asyncio.Context()
        self._sync_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(
            self._context.underlying
        )
        if grammar is not None:
            client.grammars = GrammarCompiler(grammar, self._sync_context)
        self._inbox: AsyncInbox[FrontInbound] | None = None
        self._scheduler: Outbox | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._first_ready: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started_at: dict[str, float] = {}
        self._failures: dict[str, int] = {"scheduler": 0, "detokenizer": 0}

    async def start(self) -> None:
        """Open the sockets and start both children; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._first_ready = self._loop.create_future()
        # Nobody may be waiting for it; its error is also in `status.last_failure`.
        self._first_ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._inbox = AsyncInbox(self._context, front_address(self.run_folder), FrontInbound)
        self._run(self._receive())
        self._start_worker()
        self._start_detokenizer()

    async def wait_ready(self) -> None:
        """Wait for the first ready.

        Raises:
            StartupError: the first start failed; the message is one line.
        """
        assert self._first_ready is not None, "start() comes first"
        await self._first_ready

    async def stop(self) -> None:
        """End the children, close the sockets, remove the run folder."""
        self._stopping = True
        both = (self._worker, self._detokenizer)
        stops: list[Callable[..., None]] = [
            child.stop for child in both if child is not None and child.is_alive
        ]
        grammars = self.client.grammars
        if grammars is not None:
            stops.append(grammars.stop)
        await asyncio.gather(*(asyncio.to_thread(stop) for stop in stops))
        for task in list(self._tasks):
            task.cancel()
        self.client.ready = False
        self.client.fail_all("The server was stopped.")
        if grammars is not None:
            grammars.close()
        if self._inbox is not None:
            self._inbox.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._context.destroy(linger=0)
        self.shared.close()
        shutil.rmtree(self.run_folder, ignore_errors=True)

    def end_children(self) -> None:
        """End the children and remove the run folder without the event loop.

        For the end of the interpreter, when no thread may be started any more.
        """
        self._stopping = True
        for child in (self._worker, self._detokenizer):
            if child is not None:
                child.stop()
        if self.client.grammars is not None:
            self.client.grammars.stop()
        shutil.rmtree(self.run_folder, ignore_errors=True)

    def kill_worker(self, why: str) -> None:
        """End a worker that hangs; it is started again like one that died by itself."""
        logger.error("Ending the worker: %s", why)
        if not self._restarts:
            self._set(last_failure=f"The worker was ended: {why}.")
        if self._worker is not None:
            self._worker.kill()

    def pids(self) -> dict[str, int]:
        """Process ids of the living children."""
        children = (self._worker, self._detokenizer)
        pids = {
            child.entry: child.pid for child in children if child is not None and child.is_alive
        }
        grammars = self.client.grammars
        if grammars is not None and grammars.pid is not None:
            pids["grammar"] = grammars.pid
        return pids

    # ---- children ----

    def _run(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]  # any coroutine
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_worker(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        self.shared.reset()
        address = scheduler_address(self.run_folder, self._worker_config.generation)
        self._scheduler = Outbox(self._sync_context, address)
        self.client.connect(self._scheduler.send)
        self._started_at["scheduler"] = time.monotonic()
        threads = str(self._worker_config.num_threads)
        environment = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # Threads that spin between two operators starve the front on a small machine.
            "GOMP_SPINCOUNT": "1000",
            "OMP_WAIT_POLICY": "passive",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._worker = self._start_child("scheduler", self._worker_config, environment)

    def _start_detokenizer(self) -> None:
        self._started_at["detokenizer"] = time.monotonic()
        environment = {"TOKENIZERS_PARALLELISM": "false"}
        self._detokenizer = self._start_child("detokenizer", self._detokenizer_config, environment)

    def _start_child(self, entry: str, config: object, environment: dict[str, str]) -> Child:
        # Where a death is final, the owner has to say why: there is no log to look into.
        relays = not self._restarts
        return Child(entry, config, self._exited_on_thread, environment, relays_stderr=relays)

    def _exited_on_thread(self, child: Child, code: int) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._exited, child, code)

    def _exited(self, child: Child, code: int) -> None:
        if self._stopping or child not in (self._worker, self._detokenizer):
            return
        why = f"The {child.entry} process {describe_exit(code)}."
        if not self._restarts:
            self._end(child, code, why)
            return
        if child is self._worker and self._first_ready is not None and not self._first_ready.done():
            message = self.status.last_failure or why
            self._set(phase="failed", last_failure=message)
            self._first_ready.set_exception(StartupError(message))
            return
        logger.error("%s Requests in flight fail; starting it again.", why)
        self.client.ready = False
        self.client.fail_all(f"{why} It is being restarted; please send the request again.")
        self._set(last_failure=why, num_restarts=self.status.num_restarts + 1)
        if child is self._worker:
            self._set(worker=None, phase="starting", fraction=0.0)
        else:
            self._set(detokenizer_ready=False)
        self._run(self._restart(child))

    def _end(self, child: Child, code: int, why: str) -> None:
        words = child.last_words
        text = self.status.last_failure or why
        if code == -signal.SIGKILL:
            text += " A system that runs out of memory ends processes this way."
        text = f"{text} Its last words:\n{words}" if words else text
        self.client.ready = False
        self._set(phase="failed", last_failure=text, worker=None)
        self.client.fail_all(text)
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(StartupError(text))

    async def _restart(self, child: Child) -> None:
        name = child.entry
        lived_s = time.monotonic() - self._started_at[name]
        self._failures[name] = 0 if lived_s > STABLE_AFTER_S else self._failures[name] + 1
        delays = RESTART_DELAYS_S
        await asyncio.sleep(
            delays[min(self._failures[name], len(delays)) - 1] if self._failures[name] else 0
        )
        if self._stopping:
            return
        if child is self._worker:
            # Fresh addresses on every restart: nothing meant for the dead process can arrive.
            generation = self._worker_config.generation + 1
            self._worker_config = dataclasses.replace(self._worker_config, generation=generation)
            self._start_worker()
        else:
            # The living worker still feeds the requests that just failed.
            self.client.stop_orphans()
        await self._replace_detokenizer()

    async def _replace_detokenizer(self) -> None:
        # Both children name each other's address, so they change generation together.
        old = self._detokenizer
        self._detokenizer = None
        self._set(detokenizer_ready=False)
        if old is not None and old.is_alive:
            await asyncio.to_thread(old.stop)
        self._detokenizer_config = dataclasses.replace(
            self._detokenizer_config,
            generation=self._worker_config.generation,
            scheduler_generation=self._worker_config.generation,
        )
        self._start_detokenizer()

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
                self.client.on_deltas(message)
            case RequestError():
                self.client.on_request_error(message)
            case GrammarReply():
                if self.client.grammars is not None:
                    self.client.grammars.on_reply(message)
            case ControlReply():
                self.client.on_control_reply(message)
            case Progress():
                self._set(phase=message.phase, fraction=message.fraction, detail=message.detail)
            case WorkerReady():
                self.client.limits = dataclasses.replace(
                    self.client.limits, max_total_num_tokens=message.max_total_num_tokens
                )
                self._set(worker=message)
                self._became_ready()
            case DetokenizerReady():
                self._set(detokenizer_ready=True)
                self._became_ready()
            case StartupFailed():
                self._set(phase="failed", last_failure=message.message)

    def _became_ready(self) -> None:
        if not self.status.is_ready:
            return
        self.client.ready = True
        self._set(phase="ready", fraction=1.0, ready_at=time.monotonic())
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_result(None)

    def _set(self, **changes: object) -> None:
        for name, value in changes.items():
            setattr(self.status, name, value)
        for callback in self.on_change:
            callback(self.status)
