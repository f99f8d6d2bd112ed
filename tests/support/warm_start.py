"""Starts a server's processes as forks of one process that has imported their modules already.

Importing torch and the web framework takes most of a small server's start: three of its four
seconds of processor time. A test run starts hundreds of servers. So each test process has one
process that imports everything once (the origin), and that forks itself for each server. A fork
then does what the command would have done: it has the command's arguments, environment, folder,
descriptors and parent, and runs the same module as `__main__`.

A front process is a fork of the origin. It starts its own children in the same way, with a further
fork of the origin, which is its child (the helper).

    test process ─── origin                  tests.support.warm_start
         └── front process                   server.launch
                 ├── helper                  tests.support.warm_start
                 ├── worker                  runtime.ipc.process scheduler
                 └── detokenizer             runtime.ipc.process detokenizer

A process becomes the parent of a fork that the origin or the helper has made because the fork's
first parent ends at once, and the process has told Linux that it takes orphans.

What differs from a command: torch is in the memory of the front process, too, and the hash seed is
the same in all processes of a test run. Tests for which this matters start a server with
`plain=True`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

# What the processes of a server import before they are ready. `server.launch` and the modules that
# it imports late are executed in the fork.
_MODULES = (
    "server.front",
    "server.app",
    "uvicorn.protocols.http.httptools_impl",
    "runtime.text.detokenizer_process",
    "runtime.grammar.compiler",
    "runtime.grammar.llguidance",
    "runtime.worker.worker_process",
)
_STARTED = ("server.launch", "runtime.ipc.process")
# With these options of a server its worker starts processes, too.
_OF_RANKS = {"--tp-size", "--pp-size", "--nnodes"}
# Variables that may differ from those of the origin, because the modules read them in the fork.
# The worker sets the number of threads once more itself.
_LATE_VARIABLES = {
    "AIP_PREDICT_ROUTE",
    "HEADRACE_DIST_KEY",
    "HEADRACE_STACKS_FILE",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OTEL_BSP_SCHEDULE_DELAY",
    "OTEL_RESOURCE_ATTRIBUTES",
    "PYTEST_CURRENT_TEST",
    "PYTHONPATH",
    "SGLANG_TORCH_PROFILER_DIR",
    "TOKENIZERS_PARALLELISM",
}
# Read when a library is loaded. The product sets the first two for workers; the last one keeps
# numpy from starting a thread, which would not survive a fork.
_EARLY_VARIABLES = {
    "GOMP_SPINCOUNT": "1000",
    "OMP_WAIT_POLICY": "passive",
    "OPENBLAS_NUM_THREADS": "1",
}
# The command line of a fork is written over that of the origin, which must be longer.
_ROOM = "-" * 4096
_SET_CHILD_SUBREAPER = 36
_MOST_DESCRIPTORS = 250
_ABOVE_OTHERS = 500
_libc = ctypes.CDLL(None, use_errno=True)


class _Job(NamedTuple):
    """A process to start; the descriptors come beside it, in the order of `targets`."""

    args: list[str]
    folder: str
    environment: dict[str, str]
    targets: list[int]
    new_session: bool


# ---- the side of a process that starts others ----


class Starter:
    """Starts processes as forks of a process at the other end of a socket."""

    def __init__(self, control: socket.socket, environment: Mapping[str, str]) -> None:
        """Use the process at the other end of `control`, which was started in `environment`."""
        self._control = control
        self._environment = dict(environment)
        self._lock = threading.Lock()

    def can_start_in(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork can be what a command in this environment would be."""
        wanted = {**_EARLY_VARIABLES, **environment}
        names = wanted.keys() | self._environment.keys()
        differ = {name for name in names if wanted.get(name) != self._environment.get(name)}
        return differ <= _LATE_VARIABLES and _paths(wanted) == _paths(self._environment)

    def start(self, job: _Job, descriptors: Sequence[int]) -> int:
        """Start a process, which becomes a child of this process, and return its id."""
        with self._lock:
            _take_orphans(True)
            try:
                socket.send_fds(self._control, [json.dumps(job).encode()], descriptors)
                answer = self._control.recv(64)
            finally:
                _take_orphans(False)
        assert answer, "the process that forks servers has ended"
        return int(answer)


# Also when `subprocess.Popen` is replaced.
PlainPopen = subprocess.Popen


class WarmPopen(subprocess.Popen[Any]):
    """A `subprocess.Popen` whose process is a fork, or a plain one where that is impossible."""

    # What starts forks for this process.
    starter: Callable[[], Starter]

    def __new__(cls, args: Any, *rest: Any, **options: Any) -> Any:
        """Make an object of this class, or a plain one that has started its process."""
        if rest or not cls._can_start(args, options):
            return PlainPopen(args, *rest, **options)
        return super().__new__(cls)

    @classmethod
    def _can_start(cls, args: Any, options: Mapping[str, Any]) -> bool:
        if isinstance(args, str | bytes) or args[0] != sys.executable:
            return False
        if _module(args) not in _STARTED or {"executable", "preexec_fn", "shell"} & options.keys():
            return False
        environment = options.get("env")
        return cls.starter().can_start_in(os.environ if environment is None else environment)

    def _execute_child(self, *given: Any) -> None:
        # Python calls this method by position.
        (args, _, _, _, pass_fds, cwd, env, _, _, _, *pipes) = given[:16]
        (stdin, _, _, stdout, _, stderr) = pipes
        environment = os.environ if env is None else env
        words = [os.fspath(word) for word in args]
        new_session = bool(given[-2])
        standard = {0: stdin, 1: stdout, 2: stderr}
        kept = {target: place if place >= 0 else target for target, place in standard.items()}
        kept |= {number: number for number in pass_fds}
        folder = os.getcwd() if cwd is None else os.fspath(cwd)
        try:
            job = _Job(words, folder, dict(environment), list(kept), new_session)
            self.pid = WarmPopen.starter().start(job, list(kept.values()))
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


@cache
def _starter() -> Starter:
    """Start the origin of this process's forks; return what starts them."""
    environment = {**os.environ, **_EARLY_VARIABLES, "PYTHONPATH": _with_root()}
    environment.pop("PYTEST_CURRENT_TEST", None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        origin = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.warm_start", str(theirs.fileno()), _ROOM],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )

    def end() -> None:
        ours.close()
        origin.wait()

    atexit.register(end)
    return Starter(ours, environment)


# The forks of a server set their own.
WarmPopen.starter = _starter


def _with_root() -> str:
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def _module(args: Sequence[str]) -> str:
    return args[args.index("-m") + 1] if "-m" in args[1:3] else ""


def _paths(environment: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(environment.get("PYTHONPATH", "").split(os.pathsep)))


def _take_orphans(on: bool) -> None:
    if _libc.prctl(_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# ---- the side of the origin, the helpers, and their forks ----


def _fork_for_ever(control: socket.socket) -> tuple[_Job, list[int]]:
    """Fork for each request, until the other end is closed; return in the forks only."""
    while True:
        message, received, _, _ = socket.recv_fds(control, 1 << 20, _MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                os.write(writer, str(pid).encode())
                os._exit(0)
            os.close(reader)
            os.close(writer)
            control.close()
            return _Job(*json.loads(message)), received
        os.close(writer)
        # Once the process between has ended, the other end is the new process's parent.
        os.waitpid(between, 0)
        pid_text = os.read(reader, 64)
        for number in (reader, *received):
            os.close(number)
        control.send(pid_text)


def _become(job: _Job, received: list[int]) -> None:
    """Turn this fork into the process that the job's command would have started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if job.new_session:
        os.setsid()
    _place_descriptors(job.targets, received)
    os.chdir(job.folder)
    for name in os.environ.keys() - job.environment.keys():
        del os.environ[name]
    os.environ.update(job.environment)
    _renew_standard_files()
    _write_command_line(job.args)
    if "-P" not in job.args[:2]:
        sys.path.insert(0, job.folder)
    after = job.args.index("-m") + 2
    sys.argv = ["-m", *job.args[after:]]
    sys.orig_argv = list(job.args)


def _place_descriptors(targets: Sequence[int], received: Sequence[int]) -> None:
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD, _ABOVE_OTHERS) for number in received]
    os.closerange(3, _ABOVE_OTHERS)
    for target, number in zip(targets, aside, strict=True):
        os.dup2(number, target)
        os.close(number)


def _renew_standard_files() -> None:
    """Open `sys.stdin`, `sys.stdout` and `sys.stderr` as Python does when it starts."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(open(0, "rb", closefd=False))  # noqa: SIM115
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        file = io.TextIOWrapper(
            open(number, "wb", closefd=False),  # noqa: SIM115
            errors=errors,
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def _write_command_line(words: Sequence[str]) -> None:
    """Let the system show these words as this process's command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = "".join(f"{word}\0" for word in words).encode()[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _serve(control: socket.socket, parent: Sequence[str]) -> str:
    """Fork for each request; return, in a fork, the name of the module that it is to execute.

    Args:
        control: where the requests come from.
        parent: the command line of the process that sends them.
    """
    job, received = _fork_for_ever(control)
    if _starts_others(job.args, parent):
        environment = dict(os.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            ours.close()
            for number in received:
                os.close(number)
            return _serve(theirs, job.args)
        # A number above those that are closed next.
        number = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 2 * _ABOVE_OTHERS)
        for each in (ours, theirs):
            each.close()
        starter = Starter(socket.socket(fileno=number), environment)
        WarmPopen.starter = lambda: starter
        subprocess.Popen = WarmPopen  # type: ignore[misc]
    _become(job, received)
    return _module(job.args)


def _starts_others(args: Sequence[str], parent: Sequence[str]) -> bool:
    if _module(args) == "server.launch":
        return True
    return "scheduler" in args and not _OF_RANKS.isdisjoint(parent)


def main() -> str:
    """Import everything, then fork; return the name of the module that a fork executes."""
    from runtime.ipc.process import uncollected

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    with uncollected():
        for name in _MODULES:
            import_module(name)
        # Torch and the rest of the worker, as the worker imports them.
        import_module("runtime.worker.worker_process").import_ahead()
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    return _serve(control, sys.argv)


if __name__ == "__main__":
    started = main()
    # `runtime.ipc.process` is imported already, and is executed once more.
    warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
    runpy.run_module(started, run_name="__main__", alter_sys=True)
