"""The other ranks of a worker: child processes of rank 0, or ranks on other nodes.

If a rank ends, the worker ends, and the front process restarts all ranks together. If rank 0 ends,
the other ranks notice that their stdin or their connection is closed, and end too.
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

# Time within which rank 0 notices that a rank has ended. The other ranks often see the broken
# connection earlier, so they wait this long before they report an error.
DEATH_NOTICE_S = 2.0
_REPLY_POLL_S = 0.1


class PlanSender(Protocol):
    """Sends plans to the other ranks: the interface of `Ranks` that runners use."""

    def send(self, plan: StepPlan) -> None:
        """Send the plan of a step to every other rank."""
        ...

    def give_up(self, why: str, error: Exception) -> NoReturn:
        """End this process after a failed step, and the other ranks with it.

        `why` and `error` are logged.
        """
        ...


class Ranks:
    """Starts all ranks but rank 0, sends them plans, and ends this process if one of them ends."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: WorkerConfig,
        start_failed: Callable[[str], None],
    ) -> None:
        """Start the processes. They load the model at the same time as this process.

        Args:
            context: the ZMQ context of the sockets.
            config: rank 0's configuration.
            start_failed: called with a reason of one line, on another thread, if a rank ends during
                the start-up. When it returns, this process ends.

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
        """Wait until the ranks of other nodes have started, and connect to them."""
        link = self._config.node
        if self._nodes is None or link is None:
            return
        self._outboxes += [
            Outbox(self._context, address, encode_array, key=link_key(link.key))
            for address in self._nodes.wait()
        ]

    def started(self) -> None:
        """Record that every rank is ready: if a rank ends from now on, the start has not failed."""
        self._starting = False

    def send(self, plan: StepPlan) -> None:
        """Send the plan of a step to every other rank."""
        for outbox in self._outboxes:
            outbox.send(plan)

    def before(
        self, execute: Callable[[WorkerCommand], ControlReply]
    ) -> Callable[[WorkerCommand], ControlReply]:
        """Return a function that sends a command to all other ranks, then executes it here.

        So every rank executes a command between the same two steps. The reply is rank 0's.

        Args:
            execute: executes a command on rank 0.
        """

        def execute_on_all(command: WorkerCommand) -> ControlReply:
            for outbox in self._outboxes:
                outbox.send(command)
            return execute(command)

        return execute_on_all

    def ask(self, op: WeightOp) -> None:
        """Ask every other rank to run an operation between two steps; call `replies` afterwards."""
        call = RankCall(op)
        for outbox in self._outboxes:
            outbox.send(call)

    def replies(self, beat: Callable[[], None]) -> list[RankReply]:
        """Wait for every rank's reply to the latest `ask`; return the replies in order of rank.

        If a rank ends meanwhile, this process ends. `beat` is called often, as a heartbeat.
        """
        found: dict[int, RankReply] = {}
        while len(found) < len(self._outboxes):
            beat()
            self._inbox.wait(_REPLY_POLL_S)
            found.update((reply.rank, reply) for reply in self._inbox.drain())
        return [found[rank] for rank in sorted(found)]

    def wait_for_a_death(self) -> None:
        """Wait long enough for this process to end with the reason of a rank that has ended."""
        threading.Event().wait(DEATH_NOTICE_S)

    def give_up(self, why: str, error: Exception) -> NoReturn:
        """End this process after a failed step, and the other ranks with it.

        `why` and `error` are logged.
        """
        self.wait_for_a_death()
        with self._ending:
            logger.error("%s The worker ends.", why, exc_info=error)
            leave_at_once(1)

    def _exited(self, child: Child, code: int) -> None:
        # If a child ends at once, this waits until `__init__` has stored the child's rank.
        with self._ending:
            rank = self._children[child.pid]
        self._lost(why_ended(self._config, rank, code))

    def _lost(self, why: str) -> NoReturn:
        # The lock is not released, so that a second rank that ends is not reported.
        with self._ending:
            if self._starting:
                self._start_failed(why)
            else:
                logger.error("%s The worker ends with it.", why)
            leave_at_once(1)


class BroadcastRunner:
    """Launches steps on all ranks: sends each plan to the others, then computes it on rank 0."""

    def __init__(self, runner: Runner, ranks: PlanSender) -> None:
        """Use `runner` for rank 0's own part of each step."""
        self._runner = runner
        self._ranks = ranks

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> Pending:
        """Start to compute a step on every rank.

        The masks are not sent: the other ranks receive the tokens that rank 0 samples.
        """
        self._ranks.send(plan)
        try:
            return self._runner.launch(plan, masks)
        except Exception as error:
            # The other ranks are in the middle of the step and cannot be synchronized again.
            self._ranks.give_up(f"A step of {len(plan.rows)} sequences failed on rank 0.", error)
