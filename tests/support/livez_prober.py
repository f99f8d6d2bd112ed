"""How long `/livez` takes, asked every few milliseconds from a process of its own.

    python -m tests.support.livez_prober PORT < a pipe that is closed at the end

Prints the seconds of each answer as a JSON list. An answer that takes longer than the interval
stands for the probes that would have been sent meanwhile, too: a loop that stands still for a second
fails two hundred probes, not one.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from types import TracebackType

from tests.support.server import ROOT, python_path

INTERVAL_S = 0.005
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def main(port: int) -> None:
    times = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
            sent_at = time.monotonic()
            connection.sendall(REQUEST)
            answer = b""
            while b"\r\n\r\n" not in answer:
                part = connection.recv(65536)
                assert part, "the connection was closed"
                answer += part
            assert answer.startswith(b"HTTP/1.1 200"), answer[:100]
            took_s = time.monotonic() - sent_at
            times.append(took_s)
            times += (took_s - INTERVAL_S * n for n in range(1, int(took_s / INTERVAL_S) + 1))
    print(json.dumps(times))


class LivezProber:
    """A context in which `/livez` is asked; afterwards `times` are its seconds."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.times: list[float] = []

    def __enter__(self) -> LivezProber:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.livez_prober", str(self._port)],
            cwd=ROOT,
            env={"PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, at: TracebackType | None
    ) -> None:
        out, _ = self._process.communicate()
        self.times = sorted(json.loads(out))

    def quantile(self, share: float) -> float:
        return self.times[min(int(share * len(self.times)), len(self.times) - 1)]


if __name__ == "__main__":
    main(int(sys.argv[1]))
