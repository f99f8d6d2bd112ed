"""Connects rank 0 with the other nodes of a worker that runs on several machines.

Rank 0 starts the ranks of the other nodes, and notices when a node or one of its ranks has ended.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from runtime.checkpoint.node_traits import traits_of
from runtime.config.options import WorkerConfig
from runtime.errors import StartupError
from runtime.ipc.node_links import BEAT_INTERVAL_S, SILENCE_S, link_key, tcp_endpoint
from runtime.ipc.node_messages import (
    LeaderBeat,
    LeaderInbound,
    NodeBeat,
    NodeHello,
    NodeRefused,
    RankAddress,
    RankEnded,
    StartRanks,
)
from runtime.ipc.transport import Inbox, Outbox, rank_replies_address

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_REFUSAL_LINGER_MS = 1000
# Time between two log lines about missing nodes, seconds.
_WAITING_LINE_S = 30.0

_encoder = msgspec.msgpack.Encoder()


def with_meeting_point(config: WorkerConfig, session: int) -> WorkerConfig:
    """Open the socket through which the ranks of all nodes meet; add its port to the configuration.

    This happens before torch is imported, so that the other nodes can start at the same time.

    Args:
        config: rank 0's configuration; without other nodes, it is returned as it is.
        session: number of this start of the worker.
    """
    link = config.node
    if link is None:
        return config
    family = socket.AF_INET6 if ":" in link.leader else socket.AF_INET
    listener = socket.create_server((link.leader, 0), family=family, backlog=config.num_ranks)
    port = listener.getsockname()[1]
    node = dataclasses.replace(link, session=session, store_port=port, store_fd=listener.detach())
    return dataclasses.replace(config, node=node)


@dataclass
class _Node:
    """A node that has reported to rank 0, and when it was last heard."""

    rank: int
    hello: NodeHello
    outbox: Outbox
    heard_at: float

    @property
    def name(self) -> str:
        return f"Node {self.rank} ({self.hello.address.removeprefix('tcp://')})"


class Nodes:
    """Starts the ranks of the other nodes, and notices when a rank or a node has ended.

    Messages are received on a thread of their own, because the scheduler's loop may be busy for
    seconds.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: WorkerConfig,
        on_death: Callable[[str], None],
    ) -> None:
        """Listen for the other nodes.

        Args:
            context: the ZMQ context of the sockets.
            config: rank 0's configuration, from `with_meeting_point`.
            on_death: called on the thread with one line when a rank or a node has ended.

        Raises:
            StartupError: the address cannot be bound; the message is one line.
        """
        link = config.node
        assert link is not None, "there are several nodes"
        self._context, self._config, self._link = context, config, link
        self._on_death = on_death
        self._key = link_key(link.key)
        self._traits = traits_of(config)
        address = tcp_endpoint(link.leader, link.port)
        try:
            self._inbox: Inbox[LeaderInbound] = Inbox(
                context, address, LeaderInbound, key=self._key
            )
        except zmq.ZMQError as error:
            raise StartupError(
                f"--dist-init-addr: cannot listen on {address.removeprefix('tcp://')}: "
                f"{error.strerror}."
            ) from None
        self._replies = Outbox(
            context, rank_replies_address(Path(config.run_folder), config.generation)
        )
        self._nodes: dict[int, _Node] = {}
        self._addresses: dict[int, str] = {}
        self._all_there = threading.Event()
        threading.Thread(target=self._run, name="nodes", daemon=True).start()

    def wait(self) -> list[str]:
        """Wait until all ranks of the other nodes have started; return their addresses by rank."""
        while not self._all_there.wait(_WAITING_LINE_S):
            missing = set(range(1, self._link.num_nodes)).difference(self._nodes)
            what = ", ".join(f"node {rank}" for rank in sorted(missing)) or "the nodes' ranks"
            logger.info("Waiting for %s at port %d", what, self._link.port)
        return [self._addresses[rank] for rank in sorted(self._addresses)]

    def _run(self) -> None:
        beat_at = 0.0
        while True:
            self._inbox.wait(_POLL_S)
            for message in self._inbox.drain():
                self._receive(message)
            now = time.monotonic()
            for node in self._nodes.values():
                connection = node.outbox.connection
                if connection is not None and connection.is_closed:
                    self._on_death(f"{node.name} of the worker is gone: its connection closed.")
                if now - node.heard_at > SILENCE_S:
                    self._on_death(
                        f"{node.name} of the worker is gone: nothing heard for {SILENCE_S:g} s."
                    )
            if now - beat_at >= BEAT_INTERVAL_S:
                beat_at = now
                for node in self._nodes.values():
                    node.outbox.send(LeaderBeat(self._link.session))

    def _receive(self, message: LeaderInbound) -> None:
        match message:
            case NodeHello():
                self._greet(message)
            case NodeBeat() if message.session == self._link.session:
                if (node := self._nodes.get(message.node_rank)) is not None:
                    node.heard_at = time.monotonic()
            case RankAddress() if message.session == self._link.session:
                self._addresses[message.rank] = message.address
                if len(self._addresses) == self._config.num_ranks - self._config.num_local_ranks:
                    self._all_there.set()
            case RankEnded() if message.session == self._link.session:
                node_rank = message.rank // self._config.num_local_ranks
                name = self._nodes[node_rank].name if node_rank in self._nodes else "A node"
                self._on_death(f"{name}: {message.why}")
            case NodeBeat() | RankAddress() | RankEnded():
                pass  # of an earlier start
            case _:
                # The scheduler's thread waits for this reply at the socket for local ranks.
                self._replies.send(message)

    def _greet(self, hello: NodeHello) -> None:
        known = self._nodes.get(hello.node_rank)
        if known is not None and known.hello.incarnation == hello.incarnation:
            return
        why = self._refusal(hello, known)
        try:
            outbox = Outbox(self._context, hello.address, key=self._key, watched=not why)
        except zmq.ZMQError as error:
            logger.warning("A node at %.200r was refused: %s", hello.address, error.strerror)
            return
        if why:
            logger.warning("A node at %s was refused: %s", hello.address, why)
            outbox.send(NodeRefused(why))
            outbox.close(_REFUSAL_LINGER_MS)
            return
        node = _Node(hello.node_rank, hello, outbox, time.monotonic())
        self._nodes[hello.node_rank] = node
        logger.info("%s is there", node.name)
        link = dataclasses.replace(self._link, store_fd=-1, key="")
        outbox.send(StartRanks(_encoder.encode(dataclasses.replace(self._config, node=link))))

    def _refusal(self, hello: NodeHello, known: _Node | None) -> str:
        if known is not None:
            return f"Another node with --node-rank {hello.node_rank} is there already."
        if not 0 < hello.node_rank < self._link.num_nodes:
            return (
                f"--node-rank {hello.node_rank} must be in [1, {self._link.num_nodes - 1}] with "
                f"--nnodes {self._link.num_nodes} on node 0."
            )
        for name, what in _TRAITS.items():
            ours, theirs = getattr(self._traits, name), getattr(hello.traits, name)
            if ours != theirs:
                shown = "" if name == "model" else f": {theirs} here, {ours} on node 0"
                return f"{what} is not the same as on node 0{shown}."
        return ""


_TRAITS = {
    "version": "The version of Headrace",
    "num_nodes": "--nnodes",
    "tp_size": "--tp-size",
    "pp_size": "--pp-size",
    "model": "The model (its config.json, or the names and sizes of its weight files)",
}
