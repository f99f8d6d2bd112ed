"""How long `/livez` takes, asked every few milliseconds from a process of its own.

    python -m tests.support.livez_prober PORT PID < a pipe that is closed at the end

Prints the seconds of each answer as a JSON list. An answer that takes longer than the interval
stands for the probes that would have been sent meanwhile, too: a loop that stands still for a
second fails two hundred probes, not one.

What the server's threads waited for a core is not the server's doing, and taken off: machines that
run tests have few.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from tests.support.server import ROOT, ServerProcess, python_path

INTERVAL_S = 0.005
# What an attack leaves behind shows, too.
MIN_PROBES = 300
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def waits_s(pid: int) -> dict[str, float]:
    """Seconds that each thread of a process was ready to run and had no core."""
    waits = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            _, waited_ns, _ = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        waits[task] = int(waited_ns) / 1e9
    return waits


def is_over(timeout_s: float) -> bool:
    """Wait so long; whether the pipe was closed."""
    if select.select([sys.stdin], [], [], 0)[0]:
        time.sleep(timeout_s)
        return True
    return bool(select.select([sys.stdin], [], [], timeout_s)[0])


def main(port: int, pid: int) -> None:
    times = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not is_over(INTERVAL_S) or len(times) < MIN_PROBES:
            before = waits_s(pid)
            sent_at = time.monotonic()
            connection.sendall(REQUEST)
            answer = b""
            while b"\r\n\r\n" not in answer:
                part = connection.recv(65536)
                assert part, "the connection was closed"
                answer += part
            assert answer.startswith(b"HTTP/1.1 200"), answer[:100]
            took_s = time.monotonic() - sent_at
            # The one that held the others up: the loop's, or one that had the GIL.
            took_s -= max(now - before.get(task, 0.0) for task, now in waits_s(pid).items())
            if not times:
                print("asking", flush=True)
            times.append(max(took_s, 0.0))
            times += (took_s - INTERVAL_S * n for n in range(1, int(took_s / INTERVAL_S) + 1))
    print(json.dumps(times))


class LivezProber:
    """A context in which `/livez` is asked; afterwards `times` are its seconds."""

    def __init__(self, server: ServerProcess) -> None:
        self._arguments = [str(server.port), str(server.process.pid)]
        self.times: list[float] = []

    def __enter__(self) -> LivezProber:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.livez_prober", *self._arguments],
            cwd=ROOT,
            env={"PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "asking\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, at: TracebackType | None
    ) -> None:
        out, _ = self._process.communicate()
        self.times = sorted(json.loads(out))

    def quantile(self, share: float) -> float:
        return self.times[min(int(share * len(self.times)), len(self.times) - 1)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
