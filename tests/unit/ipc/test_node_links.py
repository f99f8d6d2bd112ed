"""Links between nodes: the shared key, closed connections, and names of interfaces."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from runtime.errors import StartupError
from runtime.ipc.node_links import interface_of, link_key, resolve_host, tcp_endpoint
from runtime.ipc.node_messages import LeaderBeat, NodeInbound
from runtime.ipc.transport import Inbox, Outbox
from tests.support.waiting import until


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_only_holders_of_the_key_are_heard(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    key = link_key("the key of all nodes")
    inbox: Inbox[NodeInbound] = Inbox(context, tcp_endpoint("127.0.0.1"), NodeInbound, key=key)
    keys = (None, link_key("the key of another network"), key)
    senders = [Outbox(context, inbox.endpoint, key=each) for each in keys]
    for session, sender in enumerate(senders):
        sender.send(LeaderBeat(session))
    assert inbox.wait(30)
    assert list(inbox.drain()) == [LeaderBeat(2)]
    # The others had more time than the one that was heard.
    assert not inbox.wait(0.3)


def test_the_sender_notices_that_the_receiver_has_closed() -> None:
    theirs: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[NodeInbound] = Inbox(theirs, tcp_endpoint("127.0.0.1"), NodeInbound)
    outbox = Outbox(ours, inbox.endpoint, watched=True)
    connection = outbox.connection
    assert connection is not None
    outbox.send(LeaderBeat(1))
    assert inbox.wait(30)
    assert not connection.is_closed
    theirs.destroy(linger=0)
    until(lambda: connection.is_closed, 30)
    outbox.close()
    ours.destroy(linger=0)


def test_connections_of_nodes_are_probed(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """A quiet connection whose other host has gone would stay open for ever."""
    inbox: Inbox[NodeInbound] = Inbox(context, tcp_endpoint("127.0.0.1"), NodeInbound)
    outbox = Outbox(context, inbox.endpoint)
    outbox.send(LeaderBeat(1))
    assert inbox.wait(30)
    port = f":{int(inbox.endpoint.rpartition(':')[2]):04X}"

    def are_probed() -> bool:
        # Fields of proc(5): addresses, state (01 is established), timer (02 is keepalive).
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ours = [row for row in rows if port in row[1] + row[2] and row[3] == "01"]
        return len(ours) == 2 and all(row[5].startswith("02:") for row in ours)

    until(are_probed)
    outbox.close()


def test_a_loopback_address_is_on_lo() -> None:
    assert interface_of("127.0.0.3") == "lo"
    assert interface_of("203.0.113.9") is None
    assert tcp_endpoint("::1", 5) == "tcp://[::1]:5"


def test_a_node_waits_until_the_name_of_node_0_is_known() -> None:
    answers = [socket.gaierror(-2, "Name or service not known"), [(0, 0, 0, "", ("10.1.2.3", 0))]]

    def look_up(*_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert resolve_host("leader", 30.0, look_up) == "10.1.2.3"
    answers.append(socket.gaierror(-2, "Name or service not known"))
    with pytest.raises(StartupError, match="leader: Name or service not known"):
        resolve_host("leader", 0.0, look_up)
