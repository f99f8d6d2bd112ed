"""Measures the response times of `/livez` every few milliseconds, from a separate process.

    python -m tests.support.livez_prober PORT PID < a pipe that is closed at the end

A line on stdin starts a period of requests, and the next line ends it. The process prints "asking"
after the first answer. At the end of the period it prints the seconds of each answer as a JSON
list. A slow answer also counts for the requests that would have been sent meanwhile: a server that
blocks for a second delays two hundred requests, not one.

The time that the server's threads waited for a CPU core is subtracted, because test machines have
few cores.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.server import ROOT, ServerProcess, python_path

INTERVAL_S = 0.005
# The measurement goes on for this number of requests, to include late effects of an attack.
NUM_AFTER = 60
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def waits_s(pid: int) -> dict[str, float]:
    """Return how long each thread of a process was ready to run without a core, in seconds."""
    waits = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            _, waited_ns, _ = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        waits[task] = int(waited_ns) / 1e9
    return waits


def ask(connection: socket.socket, pid: int) -> list[float]:
    """Return the seconds of an answer, once for each request that it counts for."""
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
    # The wait of one thread is subtracted: that of the event loop, or of a thread with the GIL.
    took_s -= max(now - before.get(task, 0.0) for task, now in waits_s(pid).items())
    instead = [took_s - INTERVAL_S * n for n in range(1, int(took_s / INTERVAL_S) + 1)]
    return [max(took_s, 0.0), *instead]


def main(port: int, pid: int) -> None:
    while sys.stdin.readline():
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = ask(connection, pid)
            print("asking", flush=True)
            while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
                times += ask(connection, pid)
            sys.stdin.readline()
            for _ in range(NUM_AFTER):
                time.sleep(INTERVAL_S)
                times += ask(connection, pid)
        print(json.dumps(times), flush=True)


class LivezProber:
    """A process that requests `/livez` within the context `times`."""

    def __init__(self, server: ServerProcess) -> None:
        self._arguments = [str(server.port), str(server.process.pid)]

    def __enter__(self) -> LivezProber:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.livez_prober", *self._arguments],
            cwd=ROOT,
            env={"PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    @contextmanager
    def times(self) -> Iterator[list[float]]:
        """Yield a list, which is filled with the sorted answer times at the end of the context."""
        assert self._tell() == "asking\n"
        times: list[float] = []
        yield times
        times += sorted(json.loads(self._tell()))

    def _tell(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


def longest_of_a_thousand(times: list[float]) -> float:
    """Return the time within which 999 of 1000 answers came; the longest if there are fewer."""
    return times[min(int(0.999 * len(times)), len(times) - 1)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
