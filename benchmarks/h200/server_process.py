"""Starts `python -m server.launch` with random weights of a shape, for case F."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.shapes import write_shape
from headrace.http_stream import HttpClient
from runtime.errors import StartupError

_POLL_S = 0.05
_READY_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready; `ready_s` counts from the start of its process."""

    url: str
    ready_s: float


@asynccontextmanager
async def running_server(
    shape: str, options: Sequence[str], environment: Mapping[str, str] | None = None
) -> AsyncIterator[RunningServer]:
    """Start a server, wait until it is ready, and stop it at the end.

    `environment` is added to that of this process.

    Raises:
        StartupError: the server ended, or was not ready after ten minutes.
    """
    with tempfile.TemporaryDirectory(prefix="bench-shape-") as folder:
        path = write_shape(shape, Path(folder) / shape)
        port = free_port()
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "server.launch", "--port", str(port)),
            *("--model-path", str(path), "--load-format", "dummy", "--log-level", "warning"),
            *options,
            env={**os.environ, **(environment or {})},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            await wait_ready(url, process)
            yield RunningServer(url, time.perf_counter() - started)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                try:
                    await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def wait_ready(url: str, process: asyncio.subprocess.Process) -> None:
    """Return once the server answers that it is ready.

    Raises:
        StartupError: the server ended, or was not ready after ten minutes.
    """
    client = HttpClient(url, {}, timeout_s=5.0)
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise StartupError(f"The server ended with exit code {process.returncode}.")
        try:
            status, _ = await client.call("GET", "/readyz")
        except (OSError, TimeoutError):
            status = 0
        if status == 200:
            client.close()
            return
        await asyncio.sleep(_POLL_S)
    raise StartupError("The server was not ready in ten minutes.")


def free_port() -> int:
    """Return a TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
