"""The folder of files and batches: one SQLite database, and the contents of the files."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from openai_api.private_database import connect
from runtime.errors import EngineDead, StartupError

P = ParamSpec("P")
T = TypeVar("T")

_TABLES = (
    "CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, "
    "filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL, "
    "created_at INTEGER NOT NULL, expires_at INTEGER)",
    "CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, "
    "is_over INTEGER NOT NULL, record BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS results (batch_id TEXT NOT NULL, line INTEGER NOT NULL, "
    "is_good INTEGER NOT NULL, answer BLOB NOT NULL, input_tokens INTEGER NOT NULL, "
    "cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, "
    "reasoning_tokens INTEGER NOT NULL, PRIMARY KEY (batch_id, line)) WITHOUT ROWID",
)


class Database:
    """The SQLite database and the file contents in a folder, which one server may use at a time.

    Attributes:
        contents: folder of the files' contents; each is named by its file id.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the folder.

        Raises:
            StartupError: the folder cannot be used, or another server uses it.
        """
        self.contents = folder / "contents"
        self._turn = asyncio.Lock()
        self._is_closed = False
        try:
            self.contents.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._connection = connect(folder / "batches.sqlite")
            for table in _TABLES:
                self._connection.execute(table)
        except BlockingIOError:
            raise StartupError(f"--file-store {folder}: another server uses it.") from None
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"--file-store {folder}: {error}.") from None

    async def run(
        self,
        work: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call `work` with the connection on a thread, and return its result.

        Calls run one after the other. The event loop does not wait for the disk.

        Raises:
            EngineDead: the server is stopping.
            Exception: whatever `work` raises.
        """

        async def alone() -> T:
            async with self._turn:
                if self._is_closed:
                    raise EngineDead("The server is shutting down.")
                return await asyncio.to_thread(work, self._connection, *args, **kwargs)

        # A call that has begun is completed even if the caller is cancelled.
        return await asyncio.shield(asyncio.create_task(alone()))

    async def close(self) -> None:
        """Wait for the running call, then release the folder so that another server may use it."""
        # The wait is needed: SQLite crashes if a connection is closed while a thread uses it.
        async with self._turn:
            self._is_closed = True
            self._connection.close()
        os.close(self._lock)
