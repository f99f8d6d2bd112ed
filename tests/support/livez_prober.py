"""Measures the response times of `/livez` every few milliseconds, from a separate process.

    python -m tests.support.livez_prober PORT PID < a pipe that is closed at the end

A line on stdin starts a period of requests, and the next line ends it. The process prints "asking"
after the first answer. At the end of the period it prints a JSON list: the seconds of each answer,
and the mean seconds of a fixed piece of Python work. A slow answer also counts for the requests
that would have been sent meanwhile: a server that blocks for a second delays two hundred requests,
not one.

Test machines have few cores, and their hosts may run other machines on them. The time that a
thread waited for a core of its own machine is subtracted. Linux does not count the time for which
the host stops or slows a core as waiting. The piece of work, done between requests, shows how slow
the machine is.
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
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.server import ROOT, ServerProcess, python_path

INTERVAL_S = 0.005
# Most of a thousand answers come within this time on a quiet machine. The faults that were found
# took 0.15 to 4 s.
MAX_LIVEZ_S = 0.08
# The measurement goes on for this number of requests, to include late effects of an attack.
NUM_AFTER = 60
# What `piece` takes on a core of an AMD EPYC that does nothing else, with Python 3.11, seconds.
NOMINAL_PIECE_S = 0.00036
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
    before = waits_s(pid) | waits_s(os.getpid())
    sent_at = time.monotonic()
    connection.sendall(REQUEST)
    answer = b""
    while b"\r\n\r\n" not in answer:
        part = connection.recv(65536)
        assert part, "the connection was closed"
        answer += part
    assert answer.startswith(b"HTTP/1.1 200"), answer[:100]
    took_s = time.monotonic() - sent_at
    # The wait of one thread is subtracted, as waits overlap: that of the event loop, of a thread
    # with the GIL, or of this process, which may have to wait when the answer is there.
    after = waits_s(pid) | waits_s(os.getpid())
    took_s -= max(now - before.get(task, 0.0) for task, now in after.items())
    instead = [took_s - INTERVAL_S * n for n in range(1, int(took_s / INTERVAL_S) + 1)]
    return [max(took_s, 0.0), *instead]


def piece() -> float:
    """Do a fixed piece of work; return its seconds, without the wait for a core."""
    waited_s, started_at = sum(waits_s(os.getpid()).values()), time.monotonic()
    ",".join([str(number) for number in range(5000)])
    took_s = time.monotonic() - started_at
    return took_s - (sum(waits_s(os.getpid()).values()) - waited_s)


def main(port: int, pid: int) -> None:
    while sys.stdin.readline():
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times, pieces = ask(connection, pid), [piece()]
            print("asking", flush=True)
            while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
                times += ask(connection, pid)
                pieces.append(piece())
            sys.stdin.readline()
            for _ in range(NUM_AFTER):
                time.sleep(INTERVAL_S)
                times += ask(connection, pid)
                pieces.append(piece())
        print(json.dumps([times, sum(pieces) / len(pieces)]), flush=True)


@dataclass
class Period:
    """What was measured within a period of requests."""

    # Sorted seconds of the answers.
    times: list[float] = field(default_factory=list)
    # How many times as long as on a quiet machine the same work took, at least 1.
    slowness: float = 1.0

    @property
    def longest_s(self) -> float:
        """The time within which 999 of 1000 answers came; the longest if there are fewer."""
        return self.times[min(int(0.999 * len(self.times)), len(self.times) - 1)]

    @property
    def is_bearable(self) -> bool:
        """Whether answers came in time for a machine that is as slow."""
        return self.longest_s < MAX_LIVEZ_S * self.slowness

    def __str__(self) -> str:
        """Return what a failed test says."""
        return f"{self.longest_s:.3f} s on a machine that was {self.slowness:.1f} times as slow"


class LivezProber:
    """A process that requests `/livez` within the context `period`."""

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
    def period(self) -> Iterator[Period]:
        """Yield a `Period`, which is filled at the end of the context."""
        assert self._tell() == "asking\n"
        period = Period()
        yield period
        times, piece_s = json.loads(self._tell())
        period.times = sorted(times)
        period.slowness = max(1.0, piece_s / NOMINAL_PIECE_S)

    def _tell(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
