"""A server on two nodes, which are two addresses of this machine or two network namespaces."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.processes import children, command
from tests.support.server import ServerProcess, free_port

KEY = "a-key-that-two-nodes-share"


class TwoNodes:
    """A server whose ranks run on two nodes; a context manager that stops both.

    Node 0 serves HTTP. Node 1 has the second half of the ranks.
    """

    def __init__(
        self,
        model: Path,
        *options: str,
        leader: str = "127.0.0.2",
        prefix: tuple[str, ...] = (),
    ) -> None:
        """Start both nodes, node 1 first; `prefix` is a command that runs node 1's command."""
        self.options = (
            *("--model-path", str(model)),
            *("--nnodes", "2", "--dist-init-addr", f"{leader}:{free_port()}"),
            *options,
        )
        self._prefix = prefix
        self.node = self.start_node()
        self.server = ServerProcess(*self.options, HEADRACE_DIST_KEY=KEY)

    def start_node(self, *options: str) -> ServerProcess:
        """Start another process for node 1."""
        return ServerProcess(
            *self.options, "--node-rank", "1", *options, prefix=self._prefix, HEADRACE_DIST_KEY=KEY
        )

    @property
    def ranks(self) -> list[int]:
        """Return the process ids of the ranks on node 1."""
        found = [self.node.process.pid, *children(self.node.process.pid)]
        return [
            child for pid in found for child in children(pid) if command(child)[-1:] == ["rank"]
        ]

    def __str__(self) -> str:
        """Return the logs of both nodes, for messages of assertions."""
        return f"{self.server}\n{self.node}"

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.node.stop()


class Namespace:
    """A network namespace that is connected to this one by a cable, which can be cut."""

    here, there = "10.77.91.1", "10.77.91.2"

    def __init__(self, name: str) -> None:
        """Create the namespace and the cable; this needs administrator rights."""
        self._name, self._ends = name, (f"{name}0", f"{name}1")
        near, far = self._ends
        inside = ("ip", "netns", "exec", name, "ip")
        for words in (
            ("ip", "netns", "add", name),
            ("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name),
            ("ip", "addr", "add", f"{self.here}/24", "dev", near),
            ("ip", "link", "set", near, "up"),
            (*inside, "addr", "add", f"{self.there}/24", "dev", far),
            (*inside, "link", "set", far, "up"),
            (*inside, "link", "set", "lo", "up"),
        ):
            subprocess.run(words, check=True, capture_output=True)
        self.prefix = ("ip", "netns", "exec", name)

    def cut(self) -> None:
        """Lose all packets from now on: both ends send to a network card that does not exist."""
        self._neighbours("replace", "lladdr", "02:00:00:00:00:99", "nud", "permanent")

    def mend(self) -> None:
        """Undo `cut`."""
        self._neighbours("del")

    def _neighbours(self, verb: str, *words: str) -> None:
        near, far = self._ends
        for prefix, address, device in (((), self.there, near), (self.prefix, self.here, far)):
            line = (*prefix, "ip", "neigh", verb, address, "dev", device, *words)
            subprocess.run(line, check=True, capture_output=True)

    def remove(self) -> None:
        """Remove the namespace and the cable."""
        subprocess.run(("ip", "netns", "del", self._name), check=False, capture_output=True)
