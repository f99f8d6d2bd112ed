"""Child processes: started by name, configured by msgpack on stdin, ended when the parent ends.

A child is `python -m runtime.ipc.process <entry>`: no fork of a threaded parent, no pickled
arguments, no `__main__` guard needed in a user's script. The parent keeps the write end of the
child's stdin; when the parent dies, in any way, the child reads end-of-file there and exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from runtime.config.options import WorkerConfig
from runtime.config.registry import Registry

CHILD_ENTRIES: Registry[Callable[[bytes], None]] = Registry(
    "child process",
    {
        "scheduler": "runtime.worker.worker_process:main",
        "rank": "runtime.worker.rank_process:main",
        "detokenizer": "runtime.text.detokenizer_process:main",
        "grammar": "runtime.grammar.compiler:main",
    },
)

# On this signal a child writes the Python stacks of its threads, even while one holds the GIL.
STACKS_SIGNAL = signal.SIGUSR1
# Environment variable with the file descriptor for them.
_STACKS_FILE = "HEADRACE_STACKS_FILE"

# The exit code of a process that ends because its device has failed.
DEVICE_LOST_CODE = 71

_encoder = msgspec.msgpack.Encoder()

_LAST_WORDS_LINES = 40
# A grandchild may keep the pipe of a dead child open.
_LAST_WORDS_WAIT_S = 1.0


def child_environment(changes: Mapping[str, str] = {}) -> dict[str, str]:
    """This process's environment, with `changes`, for a child that is one of our modules."""
    ours = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **changes}


def compute_environment(num_threads: int) -> dict[str, str]:
    """The environment that makes a worker compute with `num_threads` threads."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        # Threads that spin between two operators starve the front on a small machine.
        "GOMP_SPINCOUNT": "1000",
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
    }


def send_config(process: subprocess.Popen[bytes], config: object) -> None:
    """Send `runtime.ipc.process` its configuration; its stdin stays open, or it would exit."""
    payload = _encoder.encode(config)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(len(payload).to_bytes(8, "little") + payload)
        process.stdin.flush()


class Child:
    """One running child process and the thread that waits for its end."""

    def __init__(
        self,
        entry: str,
        config: Any,
        on_exit: Callable[[Child, int], None],
        environment: dict[str, str] | None = None,
        *,
        relays_stderr: bool = False,
    ) -> None:
        """Start `entry` with `config`; `on_exit(child, code)` is called on a thread at its end.

        With `relays_stderr` its standard error goes through this process's `sys.stderr` (which a
        notebook shows) and its end is kept for `last_words`.
        """
        self.entry = entry
        # In memory: neither a full disk nor an unread log can prevent or delay the stacks.
        self._stacks = os.fdopen(os.memfd_create(f"stacks-{entry}"), "rb")
        self._last_lines: deque[str] = deque(maxlen=_LAST_WORDS_LINES)
        self._process = subprocess.Popen(
            # -P keeps the user's current folder off the path: it may hold another `runtime`.
            [sys.executable, "-P", "-m", "runtime.ipc.process", entry],
            pass_fds=(self._stacks.fileno(),),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE if relays_stderr else None,
            env=child_environment(
                {**(environment or {}), _STACKS_FILE: str(self._stacks.fileno())}
            ),
            # A terminal's Ctrl-C must reach the front only, which then drains its children.
            start_new_session=True,
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
        """Whether the process still runs."""
        return self._process.poll() is None

    @property
    def last_words(self) -> str:
        """The end of the child's output to standard error, if that is relayed."""
        return "\n".join(self._last_lines)

    def _relay_stderr(self) -> None:
        stderr = self._process.stderr
        if stderr is None:
            return
        with stderr:
            for raw in stderr:
                line = raw.decode(errors="replace").rstrip()
                self._last_lines.append(line)
                # A notebook or a test may have closed the stream meanwhile.
                with contextlib.suppress(Exception):
                    sys.stderr.write(f"{line}\n")

    def _wait(self) -> None:
        code = self._process.wait()
        self._relay.join(_LAST_WORDS_WAIT_S)
        self._on_exit(self, code)

    def ask_for_stacks(self) -> None:
        """Make the child write the stacks of its threads; it must have begun its work."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACKS_SIGNAL)

    def stacks(self) -> str:
        """The stacks that the child has written so far; empty while the child is stopped."""
        self._stacks.seek(0)
        return self._stacks.read().decode(errors="replace")

    def kill(self) -> None:
        """End the process now."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def stop(self, timeout_s: float = 2.0) -> None:
        """Close the child's stdin, which makes it exit; kill it if it does not."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


def describe_exit(code: int) -> str:
    """Return text that follows a process's name and says how it ended: `was ended by SIGKILL`."""
    if code == DEVICE_LOST_CODE:
        return "ended because its device failed"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def why_ended(config: WorkerConfig, rank: int, code: int) -> str:
    """Return one line that names a rank whose process ended, and why."""
    why = f"Rank {rank} of the worker {describe_exit(code)}."
    with contextlib.suppress(OSError):
        why = failure_file(config, rank).read_text(encoding="utf-8") or why
    return why


def failure_file(config: WorkerConfig, rank: int) -> Path:
    """Return the file into which a rank that cannot start writes the reason, in one line."""
    return Path(config.run_folder) / f"rank-{rank}-{config.generation}.failed"


def watch_parent() -> None:
    """End this process when its parent, which holds the other end of stdin, has gone."""
    threading.Thread(target=_leave_with_parent, name="parent-watch", daemon=True).start()


def _leave_with_parent() -> None:
    # A blocking read returns only at end-of-file: the parent closed the pipe or died.
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
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
    """Exclude objects made in the context from garbage collection, for the process's lifetime.

    Otherwise the collector takes a tenth of the time of importing torch.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_child(entry: Callable[[bytes], None]) -> None:
    """Run `entry` with the configuration read from stdin, until the parent has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    size_bytes = int.from_bytes(_read_exactly(8), "little")
    payload = _read_exactly(size_bytes)
    watch_parent()
    entry(payload)


if __name__ == "__main__":
    # Before anything else: without a handler the signal would end the process.
    faulthandler.register(STACKS_SIGNAL, file=int(os.environ[_STACKS_FILE]), all_threads=True)
    run_child(lambda payload: CHILD_ENTRIES.load(sys.argv[1])(payload))
