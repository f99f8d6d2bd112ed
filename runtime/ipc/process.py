"""Child processes: started by name, configured over stdin, ended when their parent ends.

A child is started as `python -m runtime.ipc.process <entry>`. So no threaded parent is forked, no
arguments are pickled, and a user's script needs no `__main__` guard. The parent keeps the write end
of the child's stdin open. When the parent ends for any reason, the child reads end-of-file and
exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from runtime.config.options import WorkerConfig
from runtime.config.registry import Registry
from runtime.ipc.spawn import AHEAD, STACKS_FILE, WAITING_THREADS, Spawned, spawn, take_ahead

CHILD_ENTRIES: Registry[Callable[[bytes], None]] = Registry(
    "child process",
    {
        "scheduler": "runtime.worker.worker_process:main",
        "rank": "runtime.worker.rank_process:main",
        "detokenizer": "runtime.text.detokenizer_process:main",
        "grammar": "runtime.grammar.compiler:main",
    },
)

# On this signal a child writes the Python stacks of its threads, even if a thread holds the GIL.
STACKS_SIGNAL = signal.SIGUSR1
# For a process that is started ahead, the function to call before its configuration arrives.
CALLED_AHEAD: Registry[Callable[[], None]] = Registry(
    "function called ahead", {"scheduler": "runtime.worker.worker_process:import_ahead"}
)

# Exit code of a process that ends because its device no longer works.
DEVICE_LOST_CODE = 71

_encoder = msgspec.msgpack.Encoder()

_LAST_WORDS_LINES = 40
# Time to wait for the rest of a dead child's output, seconds: a grandchild may keep the pipe open.
_LAST_WORDS_WAIT_S = 1.0


def compute_environment(num_threads: int) -> dict[str, str]:
    """Return environment variables that make a worker compute with `num_threads` threads."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        **WAITING_THREADS,
    }


def send_config(process: subprocess.Popen[bytes], config: object) -> None:
    """Send a child process its configuration; its stdin stays open, otherwise it would exit."""
    payload = _encoder.encode(config)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(len(payload).to_bytes(8, "little") + payload)
        process.stdin.flush()


def _started(entry: str, environment: Mapping[str, str], *, relays_stderr: bool) -> Spawned:
    """Return a new process, or the one that was started ahead."""
    # The standard error of a process that was started ahead is this process's own.
    spawned = None if relays_stderr else take_ahead(entry)
    if spawned is None:
        return spawn(entry, environment, subprocess.PIPE if relays_stderr else None)
    send_config(spawned.process, environment)
    return spawned


class Child:
    """A child process, with the thread that waits for its end."""

    def __init__(
        self,
        entry: str,
        config: Any,
        on_exit: Callable[[Child, int], None],
        environment: dict[str, str] | None = None,
        *,
        relays_stderr: bool = False,
    ) -> None:
        """Start a child process.

        Args:
            entry: name of the process in `CHILD_ENTRIES`.
            config: the configuration, which the child reads from its stdin.
            on_exit: called with this object and the exit code when the child has ended, on a
                thread.
            environment: additional environment variables.
            relays_stderr: pass the child's standard error on to this process's `sys.stderr`, which
                a notebook shows, and keep its last lines for `last_words`.
        """
        self.entry = entry
        self._last_lines: deque[str] = deque(maxlen=_LAST_WORDS_LINES)
        self._process, self._stacks = _started(
            entry, environment or {}, relays_stderr=relays_stderr
        )
        send_config(self._process, config)
        self._on_exit = on_exit
        self._relay = threading.Thread(
            target=self._relay_stderr, name=f"stderr-{entry}-{self.pid}", daemon=True
        )
        self._relay.start()
        self._thread = threading.Thread(
            target=self._wait, name=f"wait-{entry}-{self.pid}", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    @property
    def last_words(self) -> str:
        """The last lines of the child's standard error; empty unless it is relayed."""
        return "\n".join(self._last_lines)

    def _relay_stderr(self) -> None:
        stderr = self._process.stderr
        if stderr is None:
            return
        with stderr:
            for raw in stderr:
                line = raw.decode(errors="replace").rstrip()
                self._last_lines.append(line)
                # A notebook or a test may have closed the stream.
                with contextlib.suppress(Exception):
                    sys.stderr.write(f"{line}\n")

    def _wait(self) -> None:
        code = self._process.wait()
        self._relay.join(_LAST_WORDS_WAIT_S)
        self._on_exit(self, code)

    def ask_for_stacks(self) -> None:
        """Make the child write the stacks of its threads; the child must be running its entry."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACKS_SIGNAL)

    def stacks(self) -> str:
        """Return the stacks that the child has written so far; a stopped child writes none."""
        self._stacks.seek(0)
        return self._stacks.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def stop(self, timeout_s: float = 2.0) -> None:
        """Close the child's stdin, which makes it exit; kill the child if it does not exit."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


def describe_exit(code: int) -> str:
    """Return how a process ended, a text that follows its name, such as `was ended by SIGKILL`."""
    if code == DEVICE_LOST_CODE:
        return "ended because its device failed"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def why_ended(config: WorkerConfig, rank: int, code: int) -> str:
    """Return one line that names a rank whose process ended, and the reason."""
    why = f"Rank {rank} of the worker {describe_exit(code)}."
    with contextlib.suppress(OSError):
        why = failure_file(config, rank).read_text(encoding="utf-8") or why
    return why


def failure_file(config: WorkerConfig, rank: int) -> Path:
    """Return the file to which a rank that cannot start writes the reason, in one line."""
    return Path(config.run_folder) / f"rank-{rank}-{config.generation}.failed"


def watch_parent() -> None:
    """Start a thread that ends this process when its parent closes the other end of stdin."""
    threading.Thread(target=_leave_with_parent, name="parent-watch", daemon=True).start()


def _leave_with_parent() -> None:
    # The wait reads nothing, so that it may begin before the configuration is read. Hang-ups and
    # errors are reported without being asked for.
    poller = select.poll()
    poller.register(0, 0)
    with contextlib.suppress(OSError):
        poller.poll()
    os._exit(0)


def _read_exactly(size_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < size_bytes:
        part = os.read(0, size_bytes - len(parts))
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Exclude objects created in this block from garbage collection for ever.

    Otherwise the collector takes a tenth of the time of importing torch.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_child(entry: Callable[[bytes], None], ahead: Callable[[], object] | None = None) -> None:
    """Run `entry` with the configuration read from stdin; exit when the parent ends.

    Args:
        entry: the process's main function.
        ahead: for a process that was started ahead, a function to call before the first read. Its
            errors are ignored. Stdin then has environment variables before the configuration.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch_parent()
    if ahead is not None:
        with contextlib.suppress(Exception), uncollected():
            ahead()
        os.environ.update(msgspec.msgpack.decode(_read_message(), type=dict[str, str]))
    entry(_read_message())


def _read_message() -> bytes:
    return _read_exactly(int.from_bytes(_read_exactly(8), "little"))


def _call_ahead(name: str) -> None:
    # If the import fails, the process's main function fails in the same way, and reports it.
    if name in CALLED_AHEAD.entries:
        CALLED_AHEAD.load(name)()


if __name__ == "__main__":
    # The handler comes first, because without one the signal would end the process.
    faulthandler.register(STACKS_SIGNAL, file=int(os.environ[STACKS_FILE]), all_threads=True)
    name = sys.argv[1]
    run_child(
        lambda payload: CHILD_ENTRIES.load(name)(payload),
        partial(_call_ahead, name) if sys.argv[2:] == [AHEAD] else None,
    )
