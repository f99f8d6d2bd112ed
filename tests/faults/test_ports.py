"""Of all processes of a server with two ranks, only one port is reachable from other machines."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from pathlib import Path

from tests.support.processes import children
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model

LISTENS = "0A"
UNCONNECTED = "07"


def family(pid: int) -> list[int]:
    """A process and whatever it has started."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def sockets(pid: int) -> set[str]:
    """The numbers of a process's sockets."""
    links = []
    # It may end meanwhile, or close one.
    with contextlib.suppress(FileNotFoundError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def reachable(pids: list[int]) -> set[tuple[str, int]]:
    """Kind and port of each TCP or UDP socket of processes that takes what other machines send."""
    own = set().union(*map(sockets, pids))
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if inode not in own or state not in (LISTENS, UNCONNECTED):
                continue
            words, port = local.split(":")
            # Words of four bytes, each in the machine's order.
            packed = b"".join(
                bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8)
            )
            if not ipaddress.ip_address(packed).is_loopback:
                found.add((kind, int(port, 16)))
    return found


def test_others_reach_the_http_port_alone() -> None:
    args = ("--model-path", str(tiny_model("llama")), "--tp-size", "2", "--num-threads", "1")
    with ServerProcess(*args, "--host", "0.0.0.0", "--api-key", "k") as server:
        server.wait_ready()
        pids = family(server.process.pid)
        # The front, the detokenizer, two ranks, the grammar compiler.
        assert len(pids) >= 4
        assert reachable(pids) == {("tcp", server.port)}
