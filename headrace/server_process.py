"""Functions for notebooks: start a server on a free port, wait for it, and stop it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_POLL_S = 0.2
_TERMINATE_TIMEOUT_S = 20.0
# A server's descendants end with the server. Those still running after this time are killed.
_DESCENDANTS_TIMEOUT_S = 2.0
# HTTP statuses of a server that runs; a server with a key answers 401 to requests without it.
_UP = frozenset({200, 401, 403})
_LAST_LINES = 30
_LAST_LINES_WAIT_S = 1.0
_OWN_NAMES = ("localhost", "127.0.0.1", "0.0.0.0", "::1")


class _Reservations:
    """Ports reserved for servers that this process started, each by a bound socket."""

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


class _Output:
    """Copies a server's output to this process's standard output, and keeps its last lines."""

    def __init__(self) -> None:
        read, self.descriptor = os.pipe()
        self._lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._relay = threading.Thread(target=self._pass_on, args=(read,), daemon=True)

    def start(self) -> None:
        """Close this process's writing end of the pipe, which the server has inherited."""
        os.close(self.descriptor)
        self._relay.start()

    def _pass_on(self, read: int) -> None:
        with os.fdopen(read, "rb") as pipe:
            for line in pipe:
                self._lines.append(line)
                # Writing may fail if our output is closed. Reading continues, so that the server
                # does not block on a full pipe.
                with contextlib.suppress(OSError):
                    os.write(1, line)

    def last_lines(self) -> str:
        """Return the last lines of the output; call it once the server has ended."""
        # The wait is limited, because a child of the server may still hold the pipe open.
        self._relay.join(_LAST_LINES_WAIT_S)
        return b"".join(self._lines).decode(errors="replace").rstrip()


class _Launched:
    """The servers that this process started and that have not ended, by port."""

    def __init__(self) -> None:
        self._servers: dict[int, tuple[subprocess.Popen[str], _Output]] = {}

    def add(self, port: int, process: subprocess.Popen[str], output: _Output) -> None:
        self._servers[port] = (process, output)

    def process_at(self, url: str) -> subprocess.Popen[str] | None:
        """Return the server process that listens, or will listen, at `url`; None if unknown."""
        parts = urllib.parse.urlsplit(url)
        if parts.hostname not in (*_OWN_NAMES, socket.gethostname()) or parts.port is None:
            return None
        found = self._servers.get(parts.port)
        return None if found is None else found[0]

    def forget(self, process: object) -> str:
        """Remove a server that has ended, release its port, and return its last lines of output."""
        for port, (known, output) in list(self._servers.items()):
            if known is process:
                del self._servers[port]
                return output.last_lines()
        return ""


_launched = _Launched()


def reserve_port(host: str, start: int = 30000, end: int = 40000) -> tuple[int, socket.socket]:
    """Reserve a random free port in the range from `start` to `end - 1`.

    Returns:
        The port, and a socket bound to it. While the socket is open, other callers do not get this
        port; a server that sets SO_REUSEADDR can still listen on it.

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
        # The option is set after `bind`: otherwise another process that draws ports could bind this
        # port too.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return port, reserved
    raise RuntimeError(f"No free port in [{start}, {end}) on {host}.")


def release_port(reserved: socket.socket) -> None:
    """Close the socket from `reserve_port`, so that its port may be taken again."""
    with contextlib.suppress(OSError):
        reserved.close()


def execute_shell_command(command: str, output: int | None = None) -> subprocess.Popen[str]:
    """Start `command` without a shell: quotes are parsed, words KEY=VALUE at its beginning are
    added to its environment, and `python` stands for the current interpreter.

    Args:
        command: one command line.
        output: a file descriptor for the command's output; by default this process's own output.

    Raises:
        ValueError: the command is empty.
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
    # The command runs in its own session, so that its whole process group can be ended.
    return subprocess.Popen(
        words,
        text=True,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def launch_server_cmd(
    command: str, host: str = "0.0.0.0", port: int | None = None
) -> tuple[subprocess.Popen[str], int]:
    """Start a server by its command line, to which `--port` is added.

    Notebooks use `--host 0.0.0.0` without a key, with which Headrace's server does not start. So
    this function sets the equivalent of `--allow-open-admin`.

    Args:
        command: such as `python -m server.launch --model-path DIR`.
        host: the interface on which to find a free port.
        port: the port; by default a random free one.

    Returns:
        The process, for `terminate_process`, and the port.
    """
    reserved = None
    if port is None:
        port, reserved = reserve_port(host)
    output = _Output()
    try:
        line = f"HEADRACE_ALLOW_OPEN_ADMIN=1 {command} --port {port}"
        process = execute_shell_command(line, output.descriptor)
    except BaseException:
        if reserved is not None:
            release_port(reserved)
        raise
    finally:
        output.start()
    _launched.add(port, process, output)
    if reserved is not None:
        _reservations.keep(process.pid, reserved)
    return process, port


def terminate_process(process: subprocess.Popen[Any]) -> None:
    """Stop a server and its children and wait until they have ended; then its port is free.

    It sends SIGTERM first, then SIGKILL after a timeout. It does nothing to a process that has
    ended.
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
    _launched.forget(process)


def _descendants(pid: int) -> list[int]:
    # Zombies in the result are harmless, and so are reused process ids: only descendants are found.
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
    """Poll `url` until it answers with a status of a running server.

    Args:
        url: polled with GET.
        timeout: seconds to wait; without a limit by default.
        process: the server, a `Popen` or `multiprocessing.Process`; the wait stops when it ends. By
            default the process that `launch_server_cmd` started for the port, if any.
        headers: sent with each poll.
        request_timeout: seconds for one poll.

    Raises:
        RuntimeError: the process has ended. If `launch_server_cmd` started it, the message has its
            last lines.
        ssl.SSLCertVerificationError: the server's certificate is not trusted.
        TimeoutError: the server is not ready in time.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    if process is None:
        process = _launched.process_at(url)
    while True:
        if _status(url, headers or {}, request_timeout) in _UP:
            return
        code = _exit_code(process)
        if code is not None:
            words = _launched.forget(process)
            text = f"The server process ended with exit code {code}."
            raise RuntimeError(f"{text} Its last lines:\n{words}" if words else text)
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"{url} was not ready within {timeout} s.")
        time.sleep(_POLL_S)


def wait_for_server(
    base_url: str,
    timeout: float | None = None,
    process: Any = None,
    api_key: str | None = None,
) -> None:
    """Wait until the server at `base_url` accepts requests; see `wait_for_http_ready`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # `/health` answers 503 until the model has generated a first token. `/v1/models`, which other
    # tools poll, answers earlier.
    wait_for_http_ready(f"{base_url.rstrip('/')}/health", timeout, process, headers)


def _status(url: str, headers: Mapping[str, str], timeout_s: float) -> int | None:
    request = urllib.request.Request(url, headers=dict(headers))
    # The server is on this machine or nearby, so a proxy for the web is bypassed.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None)
        if isinstance(reason, ssl.SSLCertVerificationError):
            # Waiting cannot fix an untrusted certificate.
            raise reason from None
        return None


def _exit_code(process: Any) -> int | None:
    if process is None:
        return None
    if hasattr(process, "poll"):
        return process.poll()
    return process.exitcode
