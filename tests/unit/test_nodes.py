"""A node above 0 and rank 0, each against a peer that the test plays."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import zmq

from runtime.checkpoint.node_traits import traits_of
from runtime.config.options import RankConfig, WorkerConfig
from runtime.config.parallel_options import NodeLink
from runtime.errors import StartupError
from runtime.ipc.node_links import tcp_endpoint
from runtime.ipc.node_messages import LeaderInbound, NodeHello, NodeInbound, RankEnded, StartRanks
from runtime.ipc.process import Child, failure_file
from runtime.ipc.transport import Inbox, Outbox
from runtime.processes.node_host import NodeHost
from runtime.worker.nodes import Nodes
from tests.support.server import free_port
from tests.support.waiting import until

LEADER, OTHER = "127.0.0.2", "127.0.0.3"
SESSION = 7


def _config(folder: Path, port: int) -> WorkerConfig:
    return WorkerConfig(
        run_folder=str(folder),
        generation=0,
        model_folder=str(folder),
        load_format="dummy",
        dtype="float32",
        device="cpu",
        context_len=64,
        eos_token_ids=[0],
        random_seed=0,
        mem_fraction_static=None,
        max_total_tokens=64,
        max_running_requests=1,
        max_queued_requests=None,
        chunked_prefill_size=64,
        schedule_policy="fcfs",
        page_size=16,
        disable_radix_cache=False,
        overlap=False,
        attention_backend="auto",
        num_threads=1,
        tp_size=2,
        node=NodeLink(num_nodes=2, leader=LEADER, port=port, host=OTHER, session=SESSION),
        log_level="warning",
        decode_log_interval=1000,
        stream_interval=1,
        tokenizer_folder=str(folder),
    )


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # A node's run replaces them.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield context
    for number, handler in handlers.items():
        signal.signal(number, handler)
    context.destroy(linger=0)


class _Ended:
    """A rank that has started, and ends with a code at once."""

    pid = 1

    def __init__(self, code: int) -> None:
        self.code = code
        self.configs: list[RankConfig] = []

    def start(
        self, entry: str, config: RankConfig, on_exit: Callable[[Any, int], None], *_: object
    ) -> Any:
        self.configs.append(config)
        threading.Timer(0.0, on_exit, (self, self.code)).start()
        return self

    def kill(self) -> None:
        """It has ended."""

    def stop(self) -> None:
        """It has ended."""


def _unused(*_: object) -> Child:
    raise AssertionError("no rank is started")


def _next(inbox: Inbox[LeaderInbound], kind: type[Any]) -> Any:
    found: list[Any] = []

    def has_come() -> bool:
        found.extend(message for message in inbox.drain() if isinstance(message, kind))
        return bool(found)

    until(has_come)
    return found[0]


@pytest.mark.parametrize(("code", "why"), [(0, "exit code 0"), (-signal.SIGKILL, "SIGKILL")])
def test_every_end_of_a_rank_is_reported_with_its_own_reason(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, code: int, why: str
) -> None:
    """A rank whose own link has closed ends with 0, and rank 0 would wait for it."""
    config = _config(tmp_path, free_port())
    assert config.node is not None
    inbox: Inbox[LeaderInbound] = Inbox(
        context, tcp_endpoint(LEADER, config.node.port), LeaderInbound
    )
    # The server of node 0 has been started again: generations begin at 0.
    failure_file(config, 1).write_text("The reason of another start.")
    rank = _Ended(code)
    host = NodeHost(config, config.node, 1, lambda: config.node, rank.start)
    told: list[RankEnded] = []

    def lead() -> None:
        hello = _next(inbox, NodeHello)
        outbox = Outbox(context, hello.address)
        # As by a node 0 that knows itself by an address of its own.
        link = dataclasses.replace(config.node, leader="127.0.0.9")
        leader = dataclasses.replace(config, node=link)
        outbox.send(StartRanks(msgspec.msgpack.encode(leader)))
        told.append(_next(inbox, RankEnded))
        host.stop()

    thread = threading.Thread(target=lead)
    thread.start()
    assert host.run() == 0
    thread.join()
    assert told[0].rank == 1
    assert told[0].session == SESSION
    assert why in told[0].why
    (started,) = rank.configs
    assert started.worker.node is not None
    assert started.worker.node.leader == LEADER


def test_a_node_that_waits_follows_the_name_of_node_0(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    """The pod of node 0 was started again and has another address."""
    config = _config(tmp_path, free_port())
    assert config.node is not None
    moved = dataclasses.replace(config.node, leader="127.0.0.4", host="127.0.0.5")
    inbox: Inbox[LeaderInbound] = Inbox(context, tcp_endpoint("127.0.0.4", moved.port), Any)
    answers: list[NodeLink | None] = [None]

    def find_link() -> NodeLink:
        if answers.pop() is None:
            answers.append(moved)
            raise StartupError("the name is unknown for a while")
        answers.append(moved)
        return moved

    host = NodeHost(config, config.node, 1, find_link, _unused)
    addresses: list[str] = []

    def lead() -> None:
        until(lambda: inbox.wait(0))
        addresses.extend(str(message) for message in inbox.drain())
        host.stop()

    thread = threading.Thread(target=lead)
    thread.start()
    assert host.run() == 0
    thread.join()
    assert "tcp://127.0.0.5:" in addresses[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_node_without_a_usable_address_is_refused_alone(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path, free_port())
    assert config.node is not None
    deaths: list[str] = []

    def end(why: str) -> NoReturn:
        deaths.append(why)
        raise SystemExit  # ends the thread, where the product ends the process

    Nodes(zmq.Context(), config, end)
    outbox = Outbox(context, tcp_endpoint(LEADER, config.node.port))
    inbox: Inbox[NodeInbound] = Inbox(context, tcp_endpoint(OTHER), NodeInbound)
    traits = traits_of(config)
    outbox.send(NodeHello(1, "nowhere", 1, traits))
    outbox.send(NodeHello(1, inbox.endpoint, 2, traits))
    assert inbox.wait(60)
    assert isinstance(next(inbox.drain()), StartRanks)
    (line,) = [each for each in caplog.messages if "refused" in each]
    assert line.startswith("A node at 'nowhere' was refused: Invalid argument")
    context.destroy(linger=0)
    until(lambda: all(thread.name != "nodes" for thread in threading.enumerate()))
    assert "its connection closed" in deaths[0]
