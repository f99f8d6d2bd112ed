"""Runs a real server in a subprocess: starts it on a free port, collects its log, stops it.

`running_server("qwen3")` is shared by tests that run one after the other in one process and request
the same arguments.
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

ROOT = Path(__file__).resolve().parents[2]
READY_LINE = "The server is fired up and ready to roll!"
# The ports are outside the system's range for outgoing connections, so that no port is taken before
# a server listens. Each worker of a run has its own ports.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = list(range(10_000 + _WORKER, 30_000, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))))
# Tests draw the same numbers in every process; ports must differ.
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
    """Return a module path with this checkout first."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class ServerProcess:
    """One `python -m server.launch`; a context manager that stops it."""

    def __init__(
        self,
        *args: str,
        cwd: Path | None = None,
        prefix: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        """Start with `args`; by default on a free port, and with the toy as the model.

        The default grammar library is the smaller one, with which a start takes a tenth less.
        `prefix` is a command that runs the server's command.
        """
        self.port = int(args[args.index("--port") + 1]) if "--port" in args else free_port()
        if "--model-path" not in args:
            # The toy's answers are known, and it is never downloaded.
            args = (*args, "--model-path", TOY_NAME)
        if "--port" not in args:
            args = (*args, "--port", str(self.port))
        if "--grammar-backend" not in args and "llguidance" in BACKENDS:
            args = (*args, "--grammar-backend", "llguidance")
        if "--weights-root" not in args:
            # All files that a test creates are there.
            args = (*args, "--weights-root", tempfile.gettempdir(), str(ROOT / "headrace"))
        self.url = f"http://127.0.0.1:{self.port}"
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
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
        """Everything that the server has printed so far."""
        return "\n".join(self.lines)

    def wait_for_line(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until a line holds `text`."""
        with self._changed:
            self._changed.wait_for(
                lambda: any(text in line for line in self.lines) or not self._reader.is_alive(),
                timeout_s,
            )
        assert any(text in line for line in self.lines), f"no {text!r} in:\n{self.log}"

    def wait_ready(self, timeout_s: float = 90.0) -> ServerProcess:
        """Wait for the ready line."""
        self.wait_for_line(READY_LINE, timeout_s)
        return self

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        """Wait until the server exits; return the exit code."""
        code = self.process.wait(timeout_s)
        unwatch(self.process.pid)
        self._reader.join(5)
        return code

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def child_pids(self) -> list[int]:
        """Process ids of its living children."""
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
# The model of a server that is started without one.
DEMO = "demo"
_running: dict[tuple[str, ...], ServerProcess] = {}


def running_server(model: str = "qwen3", *args: str) -> ServerProcess:
    """Return a ready server of a tiny model, one per set of arguments, until `stop_servers`.

    Args:
        model: a tiny model's name, or `DEMO`.
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
    """Return a ready server that tests of many files share; see `running_server`."""
    return running_server(*_COMMON)


def demo_server() -> ServerProcess:
    """Return a ready server of the demo model; see `running_server`."""
    return running_server(DEMO, "--enable-cache-report")


def stop_servers(*, also_common: bool) -> None:
    """Stop what `running_server` has started: unused servers take a hundredth of a core each.

    Args:
        also_common: whether to stop `common_server`, too.
    """
    for key in [key for key in _running if also_common or key != _COMMON]:
        server = _running.pop(key)
        atexit.unregister(server.stop)
        server.stop()
