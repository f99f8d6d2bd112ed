"""Runs a real server in a subprocess: starts it on a free port, collects its log, stops it.

`running_server("qwen3")` returns a server that tests share if they run one after the other in one
process and request the same arguments.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from runtime.checkpoint.demo import TOY_NAME
from tests.support.grammar_backends import BACKENDS
from tests.support.guard import unwatch, watch
from tests.support.processes import children
from tests.support.tiny_models import tiny_model
from tests.support.warm_start import PlainPopen, WarmPopen

ROOT = Path(__file__).resolve().parents[2]
READY_LINE = "The server is fired up and ready to roll!"
# The ports are outside the system's range for outgoing connections, so that a port stays free until
# a server listens on it. Each worker of a test run has ports of its own.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = list(range(10_000 + _WORKER, 30_000, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))))
# Tests draw the same random numbers in every process, but their ports must differ.
random.SystemRandom().shuffle(_PORTS)


def free_port() -> int:
    """Return an unused port, a different one each time."""
    while _PORTS:
        port = _PORTS.pop()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def python_path() -> str:
    """Return the PYTHONPATH with this checkout first."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class ServerProcess:
    """A running `python -m server.launch`; a context manager that stops it."""

    def __init__(
        self,
        *args: str,
        cwd: Path | None = None,
        prefix: tuple[str, ...] = (),
        plain: bool = False,
        **environment: str,
    ) -> None:
        """Start the server, by default on a free port and with the toy model.

        The default grammar library is llguidance, with which a start takes a tenth less time.
        `prefix` is a command that runs the server's command. With `plain`, all processes of the
        server are started as in production, which takes three more seconds of processor time.
        """
        self.port = int(args[args.index("--port") + 1]) if "--port" in args else free_port()
        if "--model-path" not in args:
            # The answers of the toy model are known, and it is never downloaded.
            args = (*args, "--model-path", TOY_NAME)
        if "--port" not in args:
            args = (*args, "--port", str(self.port))
        if "--grammar-backend" not in args and "llguidance" in BACKENDS:
            args = (*args, "--grammar-backend", "llguidance")
        if "--weights-root" not in args:
            # Tests create their files in this folder.
            args = (*args, "--weights-root", tempfile.gettempdir(), str(ROOT / "headrace"))
        self.url = f"http://127.0.0.1:{self.port}"
        self.started_at = time.monotonic()
        self.process = (PlainPopen if plain else WarmPopen)(
            [*prefix, sys.executable, "-m", "server.launch", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd or ROOT,
            env={**os.environ, "PYTHONPATH": python_path(), **environment},
        )
        watch(self.process.pid)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.client = httpx.Client(base_url=self.url, timeout=60.0)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def __str__(self) -> str:
        """Return the log, for messages of assertions."""
        return self.log

    @property
    def log(self) -> str:
        """All that the server has printed so far."""
        return "\n".join(self.lines)

    def wait_for_line(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until a line of the log contains `text`."""
        with self._changed:
            self._changed.wait_for(
                lambda: any(text in line for line in self.lines) or not self._reader.is_alive(),
                timeout_s,
            )
        assert any(text in line for line in self.lines), f"no {text!r} in:\n{self.log}"

    def wait_ready(self, timeout_s: float = 90.0) -> ServerProcess:
        """Wait until the server is ready, and return it."""
        self.wait_for_line(READY_LINE, timeout_s)
        return self

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        """Wait until the server exits; return the exit code."""
        code = self.process.wait(timeout_s)
        unwatch(self.process.pid)
        self._reader.join(5)
        return code

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the server."""
        self.process.send_signal(number)

    def child_pids(self) -> list[int]:
        """Return the ids of the server's living child processes."""
        return children(self.process.pid)

    def stop(self) -> int:
        """Terminate the server, kill it if needed, and return the exit code."""
        self.client.close()
        if self.process.poll() is None:
            self.signal()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.wait_exit()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_COMMON = ("qwen3", "--enable-metrics")
# Name of the demo model, for `running_server`.
DEMO = "demo"
_running: dict[tuple[str, ...], ServerProcess] = {}


def running_server(model: str = "qwen3", *args: str) -> ServerProcess:
    """Return a ready server of a tiny model, which is shared until `stop_servers`.

    Args:
        model: name of a tiny model, or `DEMO`.
        *args: options of the server.
    """
    key = (model, *args)
    if key not in _running:
        named = () if model == DEMO else ("--model-path", str(tiny_model(model)))
        server = ServerProcess(*named, *args)
        atexit.register(server.stop)
        _running[key] = server.wait_ready()
    return _running[key]


def common_server() -> ServerProcess:
    """Return a ready server that the tests of many files share; see `running_server`."""
    return running_server(*_COMMON)


def demo_server() -> ServerProcess:
    """Return a ready server of the demo model; see `running_server`."""
    return running_server(DEMO, "--enable-cache-report")


def stop_servers(*, also_common: bool) -> None:
    """Stop the servers of `running_server`: an idle server takes a hundredth of a core.

    Args:
        also_common: whether to stop `common_server`, too.
    """
    for key in [key for key in _running if also_common or key != _COMMON]:
        server = _running.pop(key)
        atexit.unregister(server.stop)
        server.stop()
