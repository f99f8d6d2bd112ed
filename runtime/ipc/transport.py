"""Sends and receives msgspec messages over ZMQ sockets in a private folder.

The sockets are unix sockets in a run folder with mode 0700, so other machines and other users
cannot reach them. Only the nodes of a worker on several machines use TCP
(`runtime.ipc.node_links`). A message that cannot be decoded is counted and dropped; it never ends a
process.
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

# To decode a message of this size takes a large part of a millisecond.
_LARGE_BYTES = 256 * 1024

M = TypeVar("M")
# Larger than any text or block of bytes in msgpack. A peer that sends more is disconnected.
MAX_FRAME_BYTES = 2**32
# Longest path of a unix socket in bytes, with the terminating zero.
_MAX_SOCKET_PATH = 107
# The longest name of a socket in a run folder.
_LONGEST_SOCKET_NAME = "replica-63/rank-replies-999"
RUN_FOLDER_PREFIX = "headrace-"
# The run folders of this process, with the file descriptors that hold their locks.
_locks: dict[Path, int] = {}


def create_run_folder() -> Path:
    """Create the private folder for one server's sockets; remove folders of servers that ended.

    This process holds a lock on the folder until `remove_run_folder`. The lock shows to other
    servers that this one is alive. A process id would not show it, because containers may share the
    folder for temporary files but not their process ids.

    Raises:
        StartupError: the folder cannot be created; the message is one line.
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
    """Remove a folder from `create_run_folder`; a second call does nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def _lock(folder: Path) -> int:
    """Return a file descriptor that holds the lock on `folder`.

    Raises:
        OSError: another process holds the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def create_replica_folder(run_folder: Path, rank: int) -> Path:
    """Create the private folder for one replica's sockets, in the server's run folder."""
    folder = run_folder / f"replica-{rank}"
    folder.mkdir(mode=0o700, parents=True)
    return folder


def scheduler_address(run_folder: Path, generation: int) -> str:
    """Return the address of a replica's worker; `generation` grows with every restart."""
    return f"ipc://{run_folder}/scheduler-{generation}"


def rank_address(run_folder: Path, generation: int, rank: int) -> str:
    """Return the address of a worker's rank; `generation` grows with every restart."""
    return f"ipc://{run_folder}/rank-{rank}-{generation}"


def rank_replies_address(run_folder: Path, generation: int) -> str:
    """Return the address at which rank 0 of a worker receives the replies of the other ranks."""
    return f"ipc://{run_folder}/rank-replies-{generation}"


def detokenizer_address(run_folder: Path, generation: int) -> str:
    """Return the address of a replica's detokenizer; `generation` grows with every restart."""
    return f"ipc://{run_folder}/detokenizer-{generation}"


def grammar_address(run_folder: Path, generation: int) -> str:
    """Return the address of the grammar compiler; `generation` grows with every restart."""
    return f"ipc://{run_folder}/grammar-{generation}"


def front_address(run_folder: Path) -> str:
    """Return the address of the front process; without a generation, as it is not restarted."""
    return f"ipc://{run_folder}/front"


def _socket(context: zmq.Context[Any], kind: int, address: str, key: LinkKey | None) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, "[" in address)
    if address.startswith("tcp://"):
        keep_alive(socket)
    if key is not None:
        key.protect(socket, listens=kind == zmq.PULL)
    # The queues have no limit, because a full queue would drop messages. The number of requests in
    # flight is limited elsewhere.
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket


class Outbox:
    """Sends messages to one address; never blocks.

    Attributes:
        connection: tells whether the connection has closed; `None` unless it is watched.
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
        """Connect to an address, whose receiver may not exist yet.

        Args:
            context: the ZMQ context of the socket.
            address: address of the receiver.
            enc_hook: encodes types that msgspec cannot encode.
            key: the nodes' key pair; `None` on one machine, or without encryption.
            only_connected: drop messages while there is no connection, instead of queueing them.
            watched: whether `connection` tells when the connection closes.

        Raises:
            ZMQError: the address is malformed.
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
        """Queue a message."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK, copy=True)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; queued messages are sent for at most `linger_ms`."""
        # Without this, ZMQ's thread would wait for ever until the socket's events are read.
        if self.connection is not None:
            self._socket.disable_monitor()
        self._socket.close(linger_ms)


def _ignore(num_rejected: int) -> None:
    """Do nothing."""


class _BoundSocket(Generic[M]):
    """Receives messages of one union of types at an address; all others are dropped and counted.

    Attributes:
        num_rejected: number of messages that could not be decoded.
        endpoint: the bound address, with the port if the system chose it.
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
        """Bind an address.

        Args:
            context: the ZMQ context of the socket.
            address: the address.
            message_type: the union of the types that are accepted.
            on_rejected: called for every other message, with their number so far.
            dec_hook: decodes values that the sender's `enc_hook` has encoded.
            key: the nodes' key pair; `None` on one machine, or without encryption.
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
        # All errors are caught. msgspec also raises other errors than its own, for example if a
        # text is not UTF-8.
        except Exception as error:
            self.num_rejected += 1
            self._on_rejected(self.num_rejected)
            # Only the first, second, fourth, ... message is logged, so that a flood of messages
            # does not flood the log.
            if self.num_rejected & (self.num_rejected - 1) == 0:
                logger.warning(
                    "Dropped a message of %d bytes, number %d: %s",
                    len(payload),
                    self.num_rejected,
                    error,
                )
            return None


class Inbox(_BoundSocket[M]):
    """Receives messages in a synchronous process."""

    def register(self, poller: zmq.Poller) -> None:
        """Make `poller` return when a message has arrived."""
        poller.register(self._socket, zmq.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message for at most `timeout_s` seconds; return whether one has arrived."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def drain(self) -> Iterator[M]:
        """Yield all messages that have arrived, without blocking."""
        while True:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decode(payload)
            if message is not None:
                yield message


class AsyncInbox(_BoundSocket[M]):
    """Receives messages in an asyncio process, in one task.

    The event loop watches the socket's file descriptor, so a message takes 4 microseconds. With
    `zmq.asyncio`, which creates futures and queries the socket's state each time, it takes 12
    microseconds.
    """

    # The event loop that watches the file descriptor; set by the first wait.
    _loop: asyncio.AbstractEventLoop | None = None
    _arrived: asyncio.Future[None] | None = None

    async def receive(self) -> M:
        """Return the next message; drop and count messages that cannot be decoded."""
        while True:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                await self._until_readable()
                continue
            if len(payload) > _LARGE_BYTES:
                # Other tasks run first, because decoding a large message blocks the event loop.
                await asyncio.sleep(0)
            message = self._decode(payload)
            if message is not None:
                return message

    async def _until_readable(self) -> None:
        # The descriptor signals only events after the last failed read, which has just happened.
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
