"""Starts, stops and watches the processes of all replicas, from the front process.

A replica is a worker with its detokenizer. If one of these processes dies, the front process
continues and keeps its port open. While no replica serves requests, the server is not ready.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import zmq

from runtime.client.client import EngineClient
from runtime.client.grammar_client import GrammarCompiler
from runtime.config.options import DetokenizerConfig, GrammarConfig, WorkerConfig
from runtime.errors import StartupError
from runtime.eventloop.background import Background
from runtime.ipc.messages import GrammarInbound
from runtime.ipc.shared_state import SHARED_STATE_FILE, SharedState
from runtime.ipc.transport import (
    AsyncInbox,
    create_replica_folder,
    front_address,
    remove_run_folder,
)
from runtime.processes.replica import Replica, stop_child
from runtime.processes.status import EngineStatus, ReplicaStatus

_PERIOD_S = 1.0


def still_for(replica: ReplicaStatus) -> tuple[float, str]:
    """Return the longest time for which a process of a replica has done nothing, and its name.

    The time is in seconds since the process's last heartbeat, or since the replica was ready. The
    name is `worker` or `detokenizer`.
    """
    age, name = replica.shared.oldest_beat()
    now = time.monotonic()
    return min(age, now - (replica.ready_at or now)), name


def stuck_for(client: EngineClient, replica: ReplicaStatus) -> tuple[float, str]:
    """Return `still_for` of a replica that is ready and has work; else 0 s and an empty name."""
    # A worker that hangs since it was idle does not report work. So the requests that this
    # process has sent to it count as work, too.
    in_flight = client.links[replica.rank].num_in_flight
    has_work = replica.is_ready and (replica.shared["has_work"] or in_flight)
    return still_for(replica) if has_work else (0.0, "")


async def watch(host: EngineProcesses, timeout_s: float) -> None:
    """Kill a worker or detokenizer that has work but no heartbeat for `timeout_s` seconds."""
    while True:
        await asyncio.sleep(_PERIOD_S)
        for replica in host.status.replicas:
            stuck_s, name = stuck_for(host.client, replica)
            if stuck_s > timeout_s:
                why = f"no turn of its loop for {stuck_s:.0f} s while requests wait"
                await host.kill_stuck(replica.rank, name, why)


logger = logging.getLogger(__name__)


class EngineProcesses:
    """The processes of all replicas of one engine, watched on the caller's event loop.

    Attributes:
        status: the engine's status, which the replicas update.
        on_change: functions that are called after every change of `status`.
        restarts: whether a process that dies is started again. If not, its death ends the engine.
        random_seed: seed of dummy weights.
    """

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
        """Prepare one replica for each link of `client`; `start` starts the processes.

        Args:
            worker: configuration of a worker process; those of the replicas differ in their folders
                and GPUs.
            detokenizer: configuration of a detokenizer process; those of the replicas differ in
                their folders.
            client: receives all messages, and is told when a process dies.
            run_folder: private folder, which `stop` removes.
            grammar: configuration of the grammar compiler's process; `None` for no such process.
            restarts: whether a process that dies is started again. If not, its death ends the
                engine: `status.phase` becomes `failed`, and `status.last_failure` has the process's
                last output.
        """
        self.client = client
        self.random_seed = worker.random_seed
        self.restarts = restarts
        self.run_folder = run_folder
        self.on_change: list[Callable[[EngineStatus], None]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # The grammar compiler serves all replicas, so its messages arrive here.
        self._inbox: AsyncInbox[GrammarInbound] | None = None
        self._background = Background(self.ended)
        if grammar is not None:
            client.grammars = GrammarCompiler(grammar, self._context)
        self._first_ready: asyncio.Future[None] | None = None
        self._replicas: list[Replica] = []
        statuses = []
        for link in client.links:
            folder = create_replica_folder(run_folder, link.rank)
            shared = SharedState(folder / SHARED_STATE_FILE, create=True)
            status = ReplicaStatus(rank=link.rank, shared=shared)
            statuses.append(status)
            self._replicas.append(
                Replica(
                    status,
                    config_of_replica(worker, link.rank, folder),
                    dataclasses.replace(detokenizer, run_folder=str(folder)),
                    client,
                    self._context,
                    self,
                )
            )
        self.status = EngineStatus(statuses)

    async def start(self) -> None:
        """Start all processes, without waiting until they are ready."""
        self._first_ready = asyncio.get_running_loop().create_future()
        # If the future is never awaited, its error must not be reported as unhandled. The error is
        # also in `status.fatal`.
        self._first_ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        if self.client.grammars is not None:
            self._inbox = AsyncInbox(self._context, front_address(self.run_folder), GrammarInbound)
            receive = partial(self._receive, self._inbox, self.client.grammars)
            self._background.keep(receive, "Receiving compiled grammars")
        for replica in self._replicas:
            replica.start()

    async def wait_ready(self) -> None:
        """Wait until every replica has been ready once.

        Raises:
            StartupError: the first start failed; the message is one line.
        """
        assert self._first_ready is not None, "start() comes first"
        await self._first_ready

    async def stop(self) -> None:
        """End the processes, close the sockets, and remove the run folder."""
        grammars = self.client.grammars
        stops = [replica.stop() for replica in self._replicas]
        # After `end_children` there are no processes, and no threads can be started to end them.
        if grammars is not None and grammars.pid is not None:
            stops.append(stop_child(grammars))
        await asyncio.gather(*stops)
        self.client.fail_all("The server was stopped.")
        await self._background.stop()
        if grammars is not None:
            grammars.close()
        if self._inbox is not None:
            self._inbox.close()
        self._context.destroy(linger=0)
        for status in self.status.replicas:
            status.shared.close()
        remove_run_folder(self.run_folder)

    def end_children(self) -> None:
        """End the processes and remove the run folder, without the event loop.

        This is for the exit of the interpreter, when no threads can be started.
        """
        for replica in self._replicas:
            replica.end_children()
        if self.client.grammars is not None:
            self.client.grammars.stop()
        remove_run_folder(self.run_folder)

    async def kill_stuck(self, rank: int, name: str, why: str) -> None:
        """Kill a `worker` or `detokenizer` that hangs; it is started again.

        The stacks of its threads are logged before, which takes at most 2 s.
        """
        await self._replicas[rank].kill_stuck(name, why)

    def restart_workers(self, why: str) -> None:
        """Kill all workers. They are started again with the same weights.

        Memory that was released is allocated again.
        """
        for replica in self._replicas:
            replica.kill("worker", why)

    async def renew_workers(self, folder: Path | None) -> str:
        """Replace the workers, one replica after the other; their requests continue.

        Args:
            folder: folder of the weights for the new workers; `None` for the current weights.

        Returns:
            Why a new worker could not start; empty if all are ready. After a failure, the workers
            that were replaced before keep the new weights. The caller must report this.
        """
        for replica in self._replicas:
            if why := await replica.renew(folder):
                return why
        return ""

    def restart_with(self, folder: Path) -> None:
        """Load the weights of `folder` in every worker that is started from now on."""
        for replica in self._replicas:
            replica.restart_with(folder)

    def pids(self) -> dict[str, int]:
        """Return the ids of the living processes by name.

        The worker of replica 0 is `scheduler`, that of replica 1 is `scheduler.1`, and so on.
        """
        pids = {
            f"{name}.{rank}" if rank else name: pid
            for rank, replica in enumerate(self._replicas)
            for name, pid in replica.pids().items()
        }
        grammars = self.client.grammars
        if grammars is not None and grammars.pid is not None:
            pids["grammar"] = grammars.pid
        return pids

    @staticmethod
    async def _receive(inbox: AsyncInbox[GrammarInbound], grammars: GrammarCompiler) -> None:
        while True:
            reply = await inbox.receive()
            try:
                grammars.on_reply(reply)
            except Exception:
                logger.exception("A compiled grammar failed")

    # ---- called by the replicas ----

    def changed(self) -> None:
        """Handle a change of a replica's status."""
        workers = [each.worker for each in self.status.replicas if each.worker is not None]
        if workers:
            # A request that is admitted must fit into any replica.
            capacity = min(worker.max_total_num_tokens for worker in workers)
            self.client.limits = dataclasses.replace(
                self.client.limits, max_total_num_tokens=capacity
            )
        if not self.status.has_started and all(each.is_ready for each in self.status.replicas):
            self.status.has_started = True
            if self._first_ready is not None and not self._first_ready.done():
                self._first_ready.set_result(None)
        for callback in self.on_change:
            # A callback may fail, for example because it draws on a terminal that was closed. The
            # other callbacks, and restarts, must not depend on it.
            try:
                callback(self.status)
            except Exception:
                logger.exception("A change of the status could not be reported")

    def worker_died(self) -> None:
        """Handle the death of a worker that is started again.

        The new worker allocates all its memory. If memory was released, all workers are restarted,
        so that they agree.
        """
        if len(self._replicas) > 1 and self.client.loaded.released:
            self.client.loaded.restarted()
            self.restart_workers("memory was released, and another one has it again")

    def ended(self, why: str) -> None:
        """Handle the end of a replica that is not restarted; this ends the engine."""
        self.status.fatal = why
        self.client.ready = False
        self.client.fail_all(why)
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(StartupError(why))


def config_of_replica(worker: WorkerConfig, rank: int, folder: Path) -> WorkerConfig:
    """Return the worker configuration of one replica, with its own folder and GPUs."""
    first = rank * worker.num_ranks
    gpu_ids = worker.gpu_ids[first : first + worker.num_ranks]
    return dataclasses.replace(worker, run_folder=str(folder), dp_rank=rank, gpu_ids=gpu_ids)
