"""Stores the files that clients upload, and the output files of batches."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from openai_api.batches.database import Database
from openai_api.batches.pages import Page
from runtime.client.tenant import TENANT, fits_beside_others
from runtime.errors import HeadraceError, InvalidRequest

INPUT, OUTPUT = "batch", "batch_output"
# Bytes that a file counts besides its content: its row in the database, and rounding to disk
# blocks.
FILE_BYTES = 4096
# Queries for the bytes of files and of answers: those of one tenant, or of all if the name is NULL.
_SIZES = (
    f"SELECT TOTAL(bytes + {FILE_BYTES}) FROM files WHERE tenant = COALESCE(?, tenant)",
    "SELECT TOTAL(LENGTH(answer)) FROM results WHERE batch_id IN "
    "(SELECT id FROM batches WHERE tenant = COALESCE(?, tenant))",
)
_COLUMNS = "id, tenant, filename, purpose, bytes, created_at, expires_at"


class UnknownFile(HeadraceError):
    """No file with this id is stored for this tenant."""

    status_code = 404


class StoredFile(msgspec.Struct):
    """The description of a file.

    Attributes:
        tenant: the owner of the file: the tenant (owner of an API key) that uploaded it.
        purpose: `INPUT` or `OUTPUT`.
        created_at, expires_at: Unix times in seconds.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def wire(self) -> dict[str, Any]:
        """Return the file as OpenAI's API describes it."""
        found = {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }
        return found if self.expires_at is None else {**found, "expires_at": self.expires_at}


def new_file_id() -> str:
    """Return a new id that cannot be guessed."""
    return f"file-{secrets.token_hex(12)}"


class FileStore:
    """Stores files in a folder, with their descriptions in the folder's database.

    One size limit holds for files and answers of batches together.
    """

    def __init__(
        self, database: Database, max_bytes: int, now: Callable[[], float] = time.time
    ) -> None:
        """Use the folder of `database`.

        Args:
            database: the folder with its database.
            max_bytes: most bytes of files and answers of batches together.
            now: returns the Unix time.
        """
        self._database = database
        self._max_bytes = max_bytes
        self._now = now

    async def add(
        self, content: bytes | bytearray, filename: str, tenant: str, expiry_s: int | None
    ) -> StoredFile:
        """Store an uploaded file and return its description.

        Args:
            content: the file's bytes.
            filename: the file's name, as the client sent it.
            tenant: the owner.
            expiry_s: seconds after which the file is deleted; None for never.

        Raises:
            InvalidRequest: the store has no room for the file.
        """
        created_at = int(self._now())
        expires_at = None if expiry_s is None else created_at + expiry_s
        file = StoredFile(new_file_id(), tenant, filename, INPUT, 0, created_at, expires_at)
        return await self._database.run(self._add, file, content)

    def write(
        self, connection: sqlite3.Connection, file: StoredFile, pieces: Iterable[bytes | bytearray]
    ) -> StoredFile:
        """Write a file's content, then its description; a file with the same id is replaced."""
        path = self.path(file.id)
        with path.open("wb") as out:
            out.writelines(pieces)
        file.bytes = path.stat().st_size
        row = msgspec.structs.astuple(file)
        connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return file

    async def get(self, file_id: str, tenant: str) -> StoredFile:
        """Return the description of a file.

        Raises:
            UnknownFile: `tenant` has no such file.
        """
        rows = await self._database.run(self._rows, tenant, " AND id = ?", (file_id,))
        if not rows:
            raise UnknownFile(f"No such File object: {file_id[:64]}")
        return rows[0]

    async def page(self, tenant: str, page: Page, purpose: str | None) -> list[StoredFile]:
        """Return a page of the files of `tenant`, or only of those with `purpose`."""
        extra, given = (" AND purpose = ?", (purpose,)) if purpose else ("", ())
        return page.of(await self._database.run(self._rows, tenant, extra, given))

    async def delete(self, file_id: str) -> None:
        """Delete a file and its content."""
        await self._database.run(self._delete, file_id)

    async def check_room(self) -> None:
        """Check that the store is not full for the current tenant.

        Raises:
            InvalidRequest: the store is full.
        """
        await self._database.run(self._check_room, 1)

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content; `file_id` must be the id of a stored file."""
        return self._database.contents / file_id

    async def clean(self) -> None:
        """Delete contents without a description, which a server leaves if it ends while writing."""
        await self._database.run(self._clean)

    def _add(
        self, connection: sqlite3.Connection, file: StoredFile, content: bytes | bytearray
    ) -> StoredFile:
        self._check_room(connection, len(content) + FILE_BYTES)
        return self.write(connection, file, [content])

    def _check_room(self, connection: sqlite3.Connection, num_bytes: int) -> None:
        self._drop_expired(connection)
        own, everyone = (
            sum(connection.execute(query, given).fetchone()[0] for query in _SIZES)
            for given in ((TENANT.get(),), (None,))
        )
        if not fits_beside_others(num_bytes, own=own, everyone=everyone, most=self._max_bytes):
            raise InvalidRequest(
                f"Files and answers of batches may take {self._max_bytes} bytes together "
                "(--file-store-mb), and there is no room left for this key: delete some."
            )

    def _rows(
        self, connection: sqlite3.Connection, tenant: str, extra: str, given: tuple[Any, ...]
    ) -> list[StoredFile]:
        self._drop_expired(connection)
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM files WHERE tenant = ?{extra} ORDER BY rowid",
            (tenant, *given),
        )
        return [StoredFile(*row) for row in rows]

    def _drop_expired(self, connection: sqlite3.Connection) -> None:
        # The input of an unfinished batch stays, because the batch may be read again after a
        # restart.
        read = (
            "SELECT json_extract(CAST(record AS TEXT), '$.input_file_id') "
            "FROM batches WHERE NOT is_over"
        )
        over = f"SELECT id FROM files WHERE expires_at <= ? AND id NOT IN ({read})"
        for (file_id,) in connection.execute(over, (self._now(),)).fetchall():
            self._delete(connection, file_id)

    def _delete(self, connection: sqlite3.Connection, file_id: str) -> None:
        connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)

    def _clean(self, connection: sqlite3.Connection) -> None:
        known = {file_id for (file_id,) in connection.execute("SELECT id FROM files")}
        for path in self._database.contents.iterdir():
            if path.name not in known:
                path.unlink()
