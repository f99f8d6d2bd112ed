"""ZMQ over unix sockets in a private folder, carrying msgspec-encoded messages.

Every address is in one run folder (mode 0700), so no other machine and no other user can reach a
socket. Only the nodes of a worker that spans several use TCP (`runtime.ipc.node_links`). Bytes that
do not decode are counted and dropped: they never end a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from runtime.errors import StartupError
from runtime.ipc.node_links import Connection, LinkKey, keep_alive

logger = logging.getLogger(__name__)

# Size of a message that takes a large part of a millisecond to decode.
_LARGE_BYTES = 256 * 1024

M = TypeVar("M")
# More than msgpack can write of one text or block of bytes. A sender of more is disconnected.
MAX_FRAME_BYTES = 2**32
# Bytes of a unix socket's path that the system allows, including the terminating zero.
_MAX_SOCKET_PATH = 107
# A rank's socket of the hundredth worker.
_LONGEST_SOCKET_NAME = "replica-63/rank-replies-999"
RUN_FOLDER_PREFIX = "headrace-"
# The run folders of this process, and the descriptors that hold their locks.
_locks: dict[Path, int] = {}


def create_run_folder() -> Path:
    """Make the private folder of one server's sockets; stale ones of dead servers are removed.

    Until `remove_run_folder` this process holds a lock on the folder. A process id would not show
    that the server lives: in another container that shares the folder for temporary files, the id
    names no process, or another one.

    Raises:
        StartupError: the folder cannot be made; the message is one line.
    """
    base = Path(tempfile.gettempdir())
    longest = base / f"{RUN_FOLDER_PREFIX}{2**22}-xxxxxxxx" / _LONGEST_SOCKET_NAME
    if len(os.fsencode(longest)) > _MAX_SOCKET_PATH:
        most = _MAX_SOCKET_PATH - len(os.fsencode(longest)) + len(os.fsencode(base))
        raise StartupError(
            f"The folder for temporary files, {base}, has a path of more than {most} bytes, too "
            "many for sockets in it. Set TMPDIR to a shorter one."
        )
    for old in base.glob(f"{RUN_FOLDER_PREFIX}*"):
        pid = old.name.removeprefix(RUN_FOLDER_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):  # in use, another user's, or just removed
                lock = _lock(old)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{RUN_FOLDER_PREFIX}{os.getpid()}-", dir=base))
    except OSError as error:
        raise StartupError(
            f"The folder for temporary files, {base}, cannot be used: {error.strerror}. Set TMPDIR."
        ) from error
    with contextlib.suppress(OSError):  # some network file systems have no locks
        _locks[folder] = _lock(folder)
    return folder


def remove_run_folder(folder: Path) -> None:
    """Remove what `create_run_folder` made; a second call does nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def _lock(folder: Path) -> int:
    """A descriptor that holds the lock of `folder`; OSError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def create_replica_folder(run_folder: Path, rank: int) -> Path:
    """Make the private folder of one replica's sockets inside the server's."""
    folder = run_folder / f"replica-{rank}"
    folder.mkdir(mode=0o700, parents=True)
    return folder


def scheduler_address(run_folder: Path, generation: int) -> str:
    """Address of a replica's worker; `generation` grows with every restart."""
    return f"ipc://{run_folder}/scheduler-{generation}"


def rank_address(run_folder: Path, generation: int, rank: int) -> str:
    """Address of rank `rank` of a worker; see `scheduler_address` for `generation`."""
    return f"ipc://{run_folder}/rank-{rank}-{generation}"


def rank_replies_address(run_folder: Path, generation: int) -> str:
    """Address at which rank 0 of a worker receives the replies of the other ranks."""
    return f"ipc://{run_folder}/rank-replies-{generation}"


def detokenizer_address(run_folder: Path, generation: int) -> str:
    """Address of a replica's detokenizer; see `scheduler_address` for `generation`."""
    return f"ipc://{run_folder}/detokenizer-{generation}"


def grammar_address(run_folder: Path, generation: int) -> str:
    """Address of the grammar compiler; `generation` grows with every restart."""
    return f"ipc://{run_folder}/grammar-{generation}"


def front_address(run_folder: Path) -> str:
    """Address of the front's socket, without a generation: the front outlives its children."""
    return f"ipc://{run_folder}/front"


def _socket(context: zmq.Context[Any], kind: int, address: str, key: LinkKey | None) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, "[" in address)
    if address.startswith("tcp://"):
        keep_alive(socket)
    if key is not None:
        key.protect(socket, listens=kind == zmq.PULL)
    # Admission bounds the work in flight, so queues need no second bound that silently drops.
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket


class Outbox:
    """The sending end for one address; `send` never blocks.

    Attributes:
        connection: tells whether the connection has closed; `None` if it is not watched.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        enc_hook: Callable[[Any], Any] | None = None,
        *,
        key: LinkKey | None = None,
        only_connected: bool = False,
        watched: bool = False,
    ) -> None:
        """Connect to `address`, which may not exist yet; a malformed address raises ZMQError.

        Args:
            context: the ZMQ context of the socket.
            address: the receiver's address.
            enc_hook: encodes what msgspec cannot.
            key: the nodes' key; `None` on one machine, or without encryption.
            only_connected: drop messages while there is no connection, instead of keeping them.
            watched: let `connection` tell when the connection closes.
        """
        self._socket = _socket(context, zmq.PUSH, address, key)
        self._socket.setsockopt(zmq.IMMEDIATE, only_connected)
        self.connection = Connection(self._socket) if watched else None
        self._encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK, copy=True)

    def close(self, linger_ms: int = 0) -> None:
        """Close; queued messages have up to `linger_ms` to be sent."""
        # ZMQ's thread would wait forever for a reader of its news.
        if self.connection is not None:
            self._socket.disable_monitor()
        self._socket.close(linger_ms)


def _ignore(num_rejected: int) -> None:
    """Do nothing."""


class _BoundSocket(Generic[M]):
    """A bound end, which accepts messages of one union; all others are dropped and counted.

    Attributes:
        num_rejected: messages that did not decode.
        endpoint: the bound address, with the port that the system chose.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        message_type: Any,
        on_rejected: Callable[[int], None] = _ignore,
        *,
        dec_hook: Callable[[type, Any], Any] | None = None,
        key: LinkKey | None = None,
    ) -> None:
        """Bind `address`; only messages of the union `message_type` are accepted.

        For every other message `on_rejected` is called with their number so far. `dec_hook`
        decodes what the sender's `enc_hook` wrote. `key` is as for `Outbox`.
        """
        self._socket = _socket(context, zmq.PULL, address, key)
        self._socket.bind(address)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(
            message_type, dec_hook=dec_hook
        )
        self._on_rejected = on_rejected
        self.num_rejected = 0

    def _decode(self, payload: bytes) -> M | None:
        try:
            return self._decoder.decode(payload)
        # Any error is caught: msgspec also raises errors of other libraries, for example if text is
        # not UTF-8.
        except Exception as error:
            self.num_rejected += 1
            self._on_rejected(self.num_rejected)
            # Log at powers of two: a flood of messages must not become a flood of lines.
            if self.num_rejected & (self.num_rejected - 1) == 0:
                logger.warning(
                    "Dropped a message of %d bytes, number %d: %s",
                    len(payload),
                    self.num_rejected,
                    error,
                )
            return None


class Inbox(_BoundSocket[M]):
    """The receiving end in a synchronous process: drained without blocking, or waited on."""

    def register(self, poller: zmq.Poller) -> None:
        """Make `poller` wake when a message waits."""
        poller.register(self._socket, zmq.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Block until a message waits or the time is over; returns whether one waits."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def drain(self) -> Iterator[M]:
        """Return every message that has arrived, without blocking."""
        while True:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decode(payload)
            if message is not None:
                yield message


class AsyncInbox(_BoundSocket[M]):
    """The receiving end in an asyncio process, read by one task.

    The loop watches the socket's own descriptor: a message takes 4 microseconds. With
    `zmq.asyncio`, which makes futures and queries the socket's state each time, a message takes 12
    microseconds.
    """

    # The loop that watches the descriptor, from the first wait on.
    _loop: asyncio.AbstractEventLoop | None = None
    _arrived: asyncio.Future[None] | None = None

    async def receive(self) -> M:
        """Return the next message; skip and count messages that do not decode."""
        while True:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                await self._until_readable()
                continue
            if len(payload) > _LARGE_BYTES:
                # A message that has arrived already is returned without a turn of the loop.
                await asyncio.sleep(0)
            message = self._decode(payload)
            if message is not None:
                return message

    async def _until_readable(self) -> None:
        # The descriptor signals events after the last failed read of the socket, which has just
        # been made.
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.FD, self._wake)
        self._arrived = self._loop.create_future()
        await self._arrived

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        if self._loop is not None and not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
        self._socket.close(0)
