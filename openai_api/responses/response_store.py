"""Stores responses for later requests, in memory or in a file, bounded in size and time."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from openai_api.private_database import connect
from runtime.client.tenant import next_to_yield
from runtime.errors import StartupError

EXPIRY_S = 24 * 3600.0


class StoredResponse(msgspec.Struct):
    """A response and the conversation that it answers.

    Attributes:
        response: the response as it was sent.
        items: all items of the conversation, including those of earlier turns.
        owner: the tenant of the request; only this tenant can find the response.
    """

    response: dict[str, Any]
    items: list[dict[str, Any]]
    owner: str = ""


class ResponseStore(Protocol):
    """A store of responses by id."""

    async def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response, or replace it."""

    async def get(self, response_id: str) -> StoredResponse | None:
        """Return the stored response; None if there is none."""

    async def delete(self, response_id: str) -> bool:
        """Delete a response; return whether it was stored."""


@dataclass
class _Kept:
    encoded: bytes
    until: float
    owner: str


_DECODER = msgspec.json.Decoder(StoredResponse)


class MemoryStore:
    """Stores the newest responses in memory, as JSON so that their bytes can be counted.

    Attributes:
        num_bytes: number of bytes of all responses.
    """

    def __init__(
        self, max_bytes: int, expiry_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep at most `max_bytes` of responses, each for `expiry_s` seconds."""
        self._max_bytes = max_bytes
        self._expiry_s = expiry_s
        self._now = now
        self._kept: dict[str, _Kept] = {}
        # For each owner, the ids of its responses, the oldest first, and their number of bytes.
        self._ids: dict[str, OrderedDict[str, None]] = {}
        self._held: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all responses."""
        return sum(self._held.values())

    async def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response, or replace it; drop expired ones.

        While there are too many bytes, the oldest response of the owner with the most bytes is
        dropped. A response that alone exceeds the limit is not stored.
        """
        encoded = msgspec.json.encode(stored)
        await self.delete(response_id)
        if len(encoded) > self._max_bytes:
            return
        owner = stored.owner
        self._kept[response_id] = _Kept(encoded, self._now() + self._expiry_s, owner)
        self._ids.setdefault(owner, OrderedDict())[response_id] = None
        self._held[owner] = self._held.get(owner, 0) + len(encoded)
        for each in list(self._ids):
            while each in self._ids and self._is_over(self._kept[self._oldest(each)]):
                self._drop(self._oldest(each))
        while self.num_bytes > self._max_bytes:
            self._drop(self._oldest(next_to_yield(self._held)))

    async def get(self, response_id: str) -> StoredResponse | None:
        """Return the stored response; None if there is none, or if it has expired."""
        kept = self._kept.get(response_id)
        if kept is None:
            return None
        if self._is_over(kept):
            self._drop(response_id)
            return None
        return _DECODER.decode(kept.encoded)

    async def delete(self, response_id: str) -> bool:
        """Delete a response; return whether it was stored."""
        if response_id not in self._kept:
            return False
        self._drop(response_id)
        return True

    def _is_over(self, kept: _Kept) -> bool:
        return kept.until <= self._now()

    def _oldest(self, owner: str) -> str:
        return next(iter(self._ids[owner]))

    def _drop(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        self._held[kept.owner] -= len(kept.encoded)
        del self._ids[kept.owner][response_id]
        if not self._ids[kept.owner]:
            del self._ids[kept.owner], self._held[kept.owner]


class FileStore:
    """Stores responses in an SQLite file, which outlives the server."""

    def __init__(
        self, path: Path, max_bytes: int, expiry_s: float, now: Callable[[], float] = time.time
    ) -> None:
        """Open the file `path`, or create it; the other arguments are those of `MemoryStore`.

        Raises:
            StartupError: the file cannot be used.
        """
        self._max_bytes = max_bytes
        self._expiry_s = expiry_s
        self._now = now
        self._turn = asyncio.Lock()
        try:
            self._file = connect(path)
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS responses "
                "(id TEXT PRIMARY KEY, until REAL NOT NULL, size INTEGER NOT NULL, body BLOB, "
                "owner TEXT NOT NULL DEFAULT '')"
            )
            self._add_owners()
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"--response-store {path}: {error}.") from None

    async def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response, or replace it; responses are dropped as by `MemoryStore.put`."""
        encoded = msgspec.json.encode(stored)
        if len(encoded) <= self._max_bytes:
            await self._run(self._put, response_id, encoded, stored.owner)

    async def get(self, response_id: str) -> StoredResponse | None:
        """Return the stored response; None if there is none, or if it has expired."""
        found = await self._run(self._get, response_id)
        return None if found is None else _DECODER.decode(found)

    async def delete(self, response_id: str) -> bool:
        """Delete a response; return whether it was stored."""
        return await self._run(self._delete, response_id)

    async def _run(self, work: Callable[..., Any], *given: Any) -> Any:
        # Work runs on a thread, because the event loop must not wait for the disk.
        async with self._turn:
            return await asyncio.to_thread(work, *given)

    def _add_owners(self) -> None:
        """Add the column `owner` to a file from a server version without it."""
        columns = {row[1] for row in self._file.execute("PRAGMA table_info(responses)")}
        if "owner" in columns:
            return
        self._file.execute("ALTER TABLE responses ADD COLUMN owner TEXT NOT NULL DEFAULT ''")
        self._file.execute(
            "UPDATE responses SET owner = COALESCE(json_extract(CAST(body AS TEXT), '$.owner'), '')"
        )

    def _put(self, response_id: str, encoded: bytes, owner: str) -> None:
        now = self._now()
        self._file.execute(
            "INSERT OR REPLACE INTO responses (id, until, size, body, owner) "
            "VALUES (?, ?, ?, ?, ?)",
            (response_id, now + self._expiry_s, len(encoded), encoded, owner),
        )
        self._file.execute("DELETE FROM responses WHERE until <= ?", (now,))
        held: dict[str, int] = dict(
            self._file.execute("SELECT owner, SUM(size) FROM responses GROUP BY owner").fetchall()
        )
        while sum(held.values()) > self._max_bytes:
            heaviest = next_to_yield(held)
            rowid, size = self._file.execute(
                "SELECT rowid, size FROM responses WHERE owner = ? ORDER BY until, rowid LIMIT 1",
                (heaviest,),
            ).fetchone()
            self._file.execute("DELETE FROM responses WHERE rowid = ?", (rowid,))
            held[heaviest] -= size

    def _get(self, response_id: str) -> bytes | None:
        row = self._file.execute(
            "SELECT body FROM responses WHERE id = ? AND until > ?", (response_id, self._now())
        ).fetchone()
        return None if row is None else row[0]

    def _delete(self, response_id: str) -> bool:
        done = self._file.execute("DELETE FROM responses WHERE id = ?", (response_id,))
        return done.rowcount > 0


def open_store(path: str | None, max_mb: float) -> ResponseStore | None:
    """Open the store that the server's options select; return None if responses are not stored.

    Args:
        path: the file; None to store in memory.
        max_mb: most MiB of all responses; 0 to store none.

    Raises:
        StartupError: the file cannot be used.
    """
    max_bytes = int(max_mb * 2**20)
    if max_bytes <= 0:
        return None
    if path is None:
        return MemoryStore(max_bytes, EXPIRY_S)
    return FileStore(Path(path), max_bytes, EXPIRY_S)
