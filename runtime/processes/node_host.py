"""Runs the ranks of a node above 0: starts them on request of rank 0, and ends them with rank 0.

Such a node serves no HTTP. The worker of rank 0 may end and be started again at any time; the node
then waits for the next worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from runtime.checkpoint.node_traits import traits_of
from runtime.config.options import RankConfig, WorkerConfig
from runtime.config.parallel_options import NodeLink
from runtime.errors import StartupError
from runtime.ipc.node_links import BEAT_INTERVAL_S, SILENCE_S, link_key, tcp_endpoint
from runtime.ipc.node_messages import (
    LeaderBeat,
    NodeBeat,
    NodeHello,
    NodeInbound,
    NodeRefused,
    RankEnded,
    StartRanks,
)
from runtime.ipc.process import Child, compute_environment, failure_file, why_ended
from runtime.ipc.transport import Inbox, Outbox

logger = logging.getLogger(__name__)

_POLL_S = 0.1
# Time between two log lines while node 0 does not answer, seconds.
_WAITING_LINE_S = 15.0
# Seconds between two look-ups of node 0's address while the node waits. A pod that is started again
# has another address.
_LOOK_UP_INTERVAL_S = 2.0


class NodeHost:
    """The ranks of one node above 0, and the connection to rank 0."""

    def __init__(
        self,
        worker: WorkerConfig,
        link: NodeLink,
        node_rank: int,
        find_link: Callable[[], NodeLink | None],
        start_child: Callable[..., Child] = Child,
    ) -> None:
        """Open the sockets.

        Args:
            worker: this node's configuration. Its folders, threads and log options are used; the
                rest comes from rank 0.
            link: addresses of this node and of node 0.
            node_rank: index of this node, at least 1.
            find_link: looks up the addresses again; raises `StartupError` if they are unknown.
            start_child: starts a process as `Child` does.
        """
        self._own, self._node_rank = worker, node_rank
        self._find_link, self._start_child = find_link, start_child
        self._incarnation = secrets.randbits(62)
        self._config: WorkerConfig | None = None
        self._ranks: dict[int, tuple[int, Child]] = {}
        self._ended: queue.SimpleQueue[tuple[Child, int]] = queue.SimpleQueue()
        self._heard_at = 0.0
        self._stopping = threading.Event()
        self._open(link)

    def _open(self, link: NodeLink) -> None:
        self._link = link
        key = link_key(link.key)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: Inbox[NodeInbound] = Inbox(
            self._context, tcp_endpoint(link.host), NodeInbound, key=key
        )
        # A message for a worker that has ended must not reach the next one, so no message is kept
        # while there is no connection.
        self._outbox = Outbox(
            self._context,
            tcp_endpoint(link.leader, link.port),
            key=key,
            only_connected=True,
            watched=True,
        )
        self._hello = NodeHello(
            self._node_rank, self._inbox.endpoint, self._incarnation, traits_of(self._own)
        )

    def _close(self) -> None:
        self._outbox.close()
        self._context.destroy(linger=0)

    def stop(self) -> None:
        """Make `run` return soon."""
        self._stopping.set()

    def run(self) -> int:
        """Run ranks for rank 0 until `stop` is called; return the exit status.

        Raises:
            StartupError: rank 0 refuses this node; the message is one line.
        """
        logger.info(
            "Node %d of %d: waiting for node 0 at %s, port %d",
            self._node_rank,
            self._link.num_nodes,
            self._link.leader,
            self._link.port,
        )
        said_at, line_at = 0.0, time.monotonic()
        looked_up_at = line_at
        try:
            while not self._stopping.is_set():
                self._inbox.wait(_POLL_S)
                for message in self._inbox.drain():
                    if isinstance(message, NodeRefused):
                        raise StartupError(f"Node 0 refuses this node: {message.why}")
                    self._receive(message)
                # This comes before the check of the ranks, which also end if rank 0 has ended.
                self._notice_the_leaders_end()
                self._report_ended()
                now = time.monotonic()
                if now - said_at >= BEAT_INTERVAL_S:
                    said_at = now
                    self._outbox.send(self._beat())
                if self._config is not None:
                    line_at = now
                    continue
                if now - looked_up_at > _LOOK_UP_INTERVAL_S:
                    self._follow_the_name()
                    looked_up_at = time.monotonic()
                if now - line_at > _WAITING_LINE_S:
                    line_at = now
                    logger.warning(
                        "Node 0 does not answer at %s, port %d. Is it started, with the same "
                        "HEADRACE_DIST_KEY?",
                        self._link.leader,
                        self._link.port,
                    )
            return 0
        finally:
            self._end_ranks()
            self._close()

    def _follow_the_name(self) -> None:
        """Look up the address of node 0, and connect there if it has changed.

        An address that would be refused at the start is ignored.
        """
        with contextlib.suppress(StartupError):
            found = self._find_link()
            if found is not None and found != self._link:
                logger.info("Node 0 is now at %s, port %d", found.leader, found.port)
                self._close()
                self._open(found)

    def _beat(self) -> NodeBeat | NodeHello:
        if self._config is None or self._config.node is None:
            return self._hello
        return NodeBeat(self._node_rank, self._config.node.session)

    def _receive(self, message: StartRanks | LeaderBeat) -> None:
        self._heard_at = time.monotonic()
        if isinstance(message, StartRanks) and self._config is None:
            self._start(msgspec.msgpack.decode(message.config, type=WorkerConfig))

    def _start(self, leader: WorkerConfig) -> None:
        own = self._own
        assert leader.node is not None, "rank 0 has several nodes"
        link = dataclasses.replace(
            leader.node, leader=self._link.leader, host=self._link.host, key=self._link.key
        )
        self._config = config = dataclasses.replace(
            leader,
            node=link,
            run_folder=own.run_folder,
            model_folder=own.model_folder,
            tokenizer_folder=own.tokenizer_folder,
            num_threads=own.num_threads,
            log_level=own.log_level,
            log_format=own.log_format,
        )
        if connection := self._outbox.connection:
            # Connections that closed before this start do not count.
            while connection.is_closed:
                pass
        first = self._node_rank * config.num_local_ranks
        ranks = range(first, first + config.num_local_ranks)
        logger.info("Node 0 is there: starting rank(s) %s", ", ".join(map(str, ranks)))
        for rank in ranks:
            # The file may be left from an earlier start: after a restart of its server, node 0
            # counts generations from 0 again.
            failure_file(config, rank).unlink(missing_ok=True)
            child = self._start_child(
                "rank",
                RankConfig(worker=config, rank=rank),
                lambda child, code: self._ended.put((child, code)),
                compute_environment(config.num_threads),
            )
            self._ranks[child.pid] = rank, child

    def _report_ended(self) -> None:
        while not self._ended.empty():
            child, code = self._ended.get()
            if child.pid not in self._ranks or self._config is None:
                continue  # of an earlier start
            rank, _ = self._ranks.pop(child.pid)
            # This is also reported for exit code 0: the rank's connection closed, which rank 0 may
            # not have noticed.
            why = why_ended(self._config, rank, code)
            logger.error("%s", why)
            if self._config.node is not None:
                self._outbox.send(RankEnded(rank, why, self._config.node.session))

    def _notice_the_leaders_end(self) -> None:
        if self._config is None:
            return
        connection = self._outbox.connection
        why = "its connection closed" if connection is not None and connection.is_closed else ""
        if time.monotonic() - self._heard_at > SILENCE_S:
            why = f"nothing heard for {SILENCE_S:g} s"
        if why:
            logger.warning("The worker of node 0 is gone (%s); waiting for its next one", why)
            self._end_ranks()
            self._config = None

    def _end_ranks(self) -> None:
        ranks, self._ranks = self._ranks, {}
        for _, child in ranks.values():
            child.kill()
        for _, child in ranks.values():
            child.stop()
