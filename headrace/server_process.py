"""A server started from a notebook: on a free port, waited for, ended with its children."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_POLL_S = 0.2
_TERMINATE_TIMEOUT_S = 20.0
# What a server started leaves with it, at once.
_DESCENDANTS_TIMEOUT_S = 2.0
# A server with a key answers 401 once it listens.
_UP = frozenset({200, 401, 403})


class _Reservations:
    """Ports kept for servers that this process started, each by a bound socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: dict[int, socket.socket] = {}

    def keep(self, pid: int, reserved: socket.socket) -> None:
        with self._lock:
            self._sockets[pid] = reserved

    def release(self, pid: int) -> None:
        with self._lock:
            reserved = self._sockets.pop(pid, None)
        if reserved is not None:
            release_port(reserved)


_reservations = _Reservations()


def reserve_port(host: str, start: int = 30000, end: int = 40000) -> tuple[int, socket.socket]:
    """Take a random free port of `[start, end)`.

    Returns:
        The port, and a bound socket that keeps others from drawing it; a server that sets
        SO_REUSEADDR can still listen there.

    Raises:
        RuntimeError: every port is taken.
    """
    ports = list(range(start, end))
    random.shuffle(ports)
    for port in ports:
        reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            reserved.bind((host, port))
        except OSError:
            reserved.close()
            continue
        # Set before, it would let whoever else draws ports bind this one, too.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return port, reserved
    raise RuntimeError(f"No free port in [{start}, {end}) on {host}.")


def release_port(reserved: socket.socket) -> None:
    """Give up a port of `reserve_port`."""
    with contextlib.suppress(OSError):
        reserved.close()


def execute_shell_command(command: str) -> subprocess.Popen[str]:
    """Start `command` without a shell: quotes are read, leading KEY=VALUE words go to its
    environment, and `python` is the interpreter that runs this.

    Raises:
        ValueError: there is no command.
    """  # noqa: D205  # one sentence
    words = shlex.split(command.replace("\\\n", " "))
    environment = dict(os.environ)
    while words and _ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if not words:
        raise ValueError(f"No command in {command!r}.")
    if words[0] in ("python", "python3"):
        words[0] = sys.executable
    # A session of its own, so that all of it can be ended and nothing else.
    return subprocess.Popen(
        words, text=True, env=environment, stderr=subprocess.STDOUT, start_new_session=True
    )


def launch_server_cmd(
    command: str, host: str = "0.0.0.0", port: int | None = None
) -> tuple[subprocess.Popen[str], int]:
    """Start a server's command line with `--port` added.

    Args:
        command: such as `python -m server.launch --model-path DIR`.
        host: where a free port is looked for.
        port: the port; a random free one when absent.

    Returns:
        The process, for `terminate_process`, and the port.
    """
    reserved = None
    if port is None:
        port, reserved = reserve_port(host)
    try:
        process = execute_shell_command(f"{command} --port {port}")
    except BaseException:
        if reserved is not None:
            release_port(reserved)
        raise
    if reserved is not None:
        _reservations.keep(process.pid, reserved)
    return process, port


def terminate_process(process: subprocess.Popen[Any]) -> None:
    """Stop a server and what it started, and wait until they are gone; then its port is free.

    Asked with SIGTERM first, killed when it does not leave. Harmless for one that has ended.
    """
    descendants = _descendants(process.pid) if process.poll() is None else []
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_TERMINATE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    deadline = time.monotonic() + _DESCENDANTS_TIMEOUT_S
    for pid in descendants:
        while _is_running(pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 4)
        if _is_running(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    _reservations.release(process.pid)


def _descendants(pid: int) -> list[int]:
    # Zombies and strangers that took over a number do not matter: all are children of children.
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def wait_for_http_ready(
    url: str,
    timeout: float | None = None,
    process: Any = None,
    headers: Mapping[str, str] | None = None,
    request_timeout: float = 5.0,
) -> None:
    """Ask `url` until it answers with success.

    Args:
        url: asked with GET.
        timeout: seconds to wait; for ever when absent.
        process: the server, a `Popen` or `multiprocessing.Process`: no wait once it has ended.
        headers: sent along.
        request_timeout: seconds for one try.

    Raises:
        RuntimeError: the process has ended.
        TimeoutError: the time is over.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        if _status(url, headers or {}, request_timeout) in _UP:
            return
        code = _exit_code(process)
        if code is not None:
            raise RuntimeError(f"The server process ended with exit code {code}.")
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"{url} was not ready within {timeout} s.")
        time.sleep(_POLL_S)


def wait_for_server(
    base_url: str,
    timeout: float | None = None,
    process: Any = None,
    api_key: str | None = None,
) -> None:
    """Wait until the server at `base_url` takes requests; see `wait_for_http_ready`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # Answers 503 until a first token was generated, unlike the list of models.
    wait_for_http_ready(f"{base_url.rstrip('/')}/health", timeout, process, headers)


def _status(url: str, headers: Mapping[str, str], timeout_s: float) -> int | None:
    request = urllib.request.Request(url, headers=dict(headers))
    # The server is this machine's or a neighbour's: a proxy for the web is not asked.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None


def _exit_code(process: Any) -> int | None:
    if process is None:
        return None
    if hasattr(process, "poll"):
        return process.poll()
    return process.exitcode
