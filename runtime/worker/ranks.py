"""The other ranks of a worker: children of rank 0, or ranks of other nodes.

A rank that dies ends the worker, and the front restarts all ranks together. Ranks end when rank 0
ends: rank 0 holds the other end of their stdin, or of their connection.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

import zmq

from runtime.config.options import RankConfig, WorkerConfig
from runtime.ipc.array_codec import encode_array
from runtime.ipc.messages import ControlReply, WorkerCommand
from runtime.ipc.node_links import link_key
from runtime.ipc.process import Child, why_ended
from runtime.ipc.standard_error import leave_at_once
from runtime.ipc.transport import Inbox, Outbox, rank_address, rank_replies_address
from runtime.ipc.weight_messages import RankCall, RankReply, WeightOp
from runtime.step.executor import Pending, Runner
from runtime.step.step_plan import MaskSource, StepPlan
from runtime.worker.nodes import Nodes

logger = logging.getLogger(__name__)

# When a rank dies, other ranks often see the broken connection before rank 0 notices the exit.
DEATH_NOTICE_S = 2.0
_REPLY_POLL_S = 0.1


class PlanSender(Protocol):
    """The interface of the ranks that `BroadcastRunner` uses."""

    def send(self, plan: StepPlan) -> None:
        """Send every rank a step."""
        ...

    def give_up(self, why: str, error: Exception) -> NoReturn:
        """End this process, and the ranks with it."""
        ...


class Ranks:
    """Starts all ranks but 0, sends them plans, and ends this process when a rank dies."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: WorkerConfig,
        start_failed: Callable[[str], None],
    ) -> None:
        """Start the processes; they load at the same time as this process.

        Args:
            context: the ZMQ context of the sockets.
            config: rank 0's configuration.
            start_failed: called with the reason, one line, on another thread when a rank ends
                during start-up; this process ends as soon as it returns.

        Raises:
            StartupError: the address for other nodes cannot be bound; the message is one line.
        """
        self._context = context
        self._config = config
        self._start_failed = start_failed
        self._starting = True
        self._ending = threading.Lock()
        ranks = range(1, config.num_local_ranks)
        folder = Path(config.run_folder)
        self._outboxes = [
            Outbox(context, rank_address(folder, config.generation, rank), encode_array)
            for rank in ranks
        ]
        self._inbox: Inbox[RankReply] = Inbox(
            context, rank_replies_address(folder, config.generation), RankReply
        )
        self._nodes = None if config.node is None else Nodes(context, config, self._lost)
        self._children: dict[int, int] = {}
        with self._ending:
            for rank in ranks:
                child = Child("rank", RankConfig(worker=config, rank=rank), self._exited)
                self._children[child.pid] = rank

    def connect(self) -> None:
        """Wait until the other nodes' ranks have started, and connect to them."""
        link = self._config.node
        if self._nodes is None or link is None:
            return
        self._outboxes += [
            Outbox(self._context, address, encode_array, key=link_key(link.key))
            for address in self._nodes.wait()
        ]

    def started(self) -> None:
        """Note that every rank is ready: a later death is not reported as a failed start."""
        self._starting = False

    def send(self, plan: StepPlan) -> None:
        """Send every rank a step."""
        for outbox in self._outboxes:
            outbox.send(plan)

    def before(
        self, execute: Callable[[WorkerCommand], ControlReply]
    ) -> Callable[[WorkerCommand], ControlReply]:
        """Wrap `execute` of rank 0 so that all other ranks get every command first.

        Every rank executes a command between the same two steps. The reply is rank 0's.
        """

        def execute_on_all(command: WorkerCommand) -> ControlReply:
            for outbox in self._outboxes:
                outbox.send(command)
            return execute(command)

        return execute_on_all

    def ask(self, op: WeightOp) -> None:
        """Send every rank an operation to run between two steps; `replies` must follow."""
        call = RankCall(op)
        for outbox in self._outboxes:
            outbox.send(call)

    def replies(self, beat: Callable[[], None]) -> list[RankReply]:
        """Wait for each rank's reply to the latest `ask`; return them in order of rank.

        If a rank dies, this process ends. `beat` is called often while waiting.
        """
        found: dict[int, RankReply] = {}
        while len(found) < len(self._outboxes):
            beat()
            self._inbox.wait(_REPLY_POLL_S)
            found.update((reply.rank, reply) for reply in self._inbox.drain())
        return [found[rank] for rank in sorted(found)]

    def wait_for_a_death(self) -> None:
        """Give the thread that notices a rank's death time to end this process with its reason."""
        threading.Event().wait(DEATH_NOTICE_S)

    def give_up(self, why: str, error: Exception) -> NoReturn:
        """End this process, and the ranks with it."""
        self.wait_for_a_death()
        with self._ending:
            logger.error("%s The worker ends.", why, exc_info=error)
            leave_at_once(1)

    def _exited(self, child: Child, code: int) -> None:
        # A child that ends at once waits here until it has been noted.
        with self._ending:
            rank = self._children[child.pid]
        self._lost(why_ended(self._config, rank, code))

    def _lost(self, why: str) -> NoReturn:
        # The lock is held until the process ends: a second death need not be reported.
        with self._ending:
            if self._starting:
                self._start_failed(why)
            else:
                logger.error("%s The worker ends with it.", why)
            leave_at_once(1)


class BroadcastRunner:
    """Rank 0's runner; it sends every plan to the other ranks first."""

    def __init__(self, runner: Runner, ranks: PlanSender) -> None:
        """Wrap rank 0's own runner."""
        self._runner = runner
        self._ranks = ranks

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> Pending:
        """Start computing a step on every rank.

        Masks are not sent: the other ranks take this rank's tokens instead of their own samples.
        """
        self._ranks.send(plan)
        try:
            return self._runner.launch(plan, masks)
        except Exception as error:
            # The other ranks are in the middle of the step, and nothing can synchronize them again.
            self._ranks.give_up(f"A step of {len(plan.rows)} sequences failed on rank 0.", error)
