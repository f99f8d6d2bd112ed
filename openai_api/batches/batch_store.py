"""Stores batches and the answers to their lines in a database."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from openai_api.batches.database import Database
from openai_api.batches.file_store import OUTPUT, FileStore, StoredFile
from openai_api.batches.pages import Page
from runtime.errors import HeadraceError

WINDOW_S = 24 * 3600
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
# The most finished batches that are kept for a tenant. Clients cannot delete batches, and a batch
# may hold an error for every line.
MAX_OVER = 10_000
OVER = frozenset({"failed", "completed", "expired", "cancelled"})


class UnknownBatch(HeadraceError):
    """No batch with this id is stored for this tenant."""

    status_code = 404


class LineError(msgspec.Struct):
    """Why the input of a batch is refused. `line` is the line's number, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(msgspec.Struct, frozen=True):
    """Counts over the answers of a batch: requests by success, and tokens."""

    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch as the database stores it.

    Attributes:
        tenant: the owner of the batch: the tenant (owner of an API key) that started it.
        times: when each status began, Unix times in seconds.
        outcome: the status that the batch gets once its files are written.
        total: number of lines; 0 until they are counted.
        counts: counts over its answers, once the batch is over.
        output_expiry_s: seconds for which its output files are kept; None for no expiry.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    status: Status = "validating"
    times: dict[str, int] = {}
    outcome: Status = "completed"
    metadata: dict[str, str] | None = None
    errors: list[LineError] = []
    total: int = 0
    counts: Counts | None = None
    output_expiry_s: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def expires_at(self) -> int:
        """Unix time at which lines without an answer expire."""
        return self.created_at + WINDOW_S


def new_batch_id() -> str:
    """Return a new id that cannot be guessed."""
    return f"batch_{secrets.token_hex(16)}"


_DECODER = msgspec.json.Decoder(BatchRecord)


class BatchStore:
    """Stores all batches. If a line is answered twice, around a restart, the first answer stays."""

    def __init__(self, database: Database, files: FileStore, max_over: int = MAX_OVER) -> None:
        """Use `database`, in which the tables of batches exist.

        Args:
            database: has the batches' tables.
            files: the store of input and output files.
            max_over: most finished batches to keep per tenant.
        """
        self._database = database
        self._max_over = max_over
        self._files = files

    async def put(self, record: BatchRecord) -> None:
        """Store or replace a batch; drop the tenant's oldest finished batches over the limit."""
        await self._database.run(_put, record, self._max_over)

    async def get(self, batch_id: str, tenant: str) -> BatchRecord:
        """Return a batch by its id.

        Raises:
            UnknownBatch: `tenant` has no such batch.
        """
        found = await self._database.run(_select, "id = ? AND tenant = ?", (batch_id, tenant))
        if not found:
            raise UnknownBatch(f"No batch found with id '{batch_id[:64]}'.")
        return found[0]

    async def page(self, tenant: str, page: Page) -> list[BatchRecord]:
        """Return a page of the batches of `tenant`."""
        return await self._database.run(_page, tenant, page)

    async def unfinished(self) -> list[BatchRecord]:
        """Return the batches of all tenants that are not over, the oldest first."""
        return await self._database.run(_select, "NOT is_over", ())

    async def answered(self, batch_id: str) -> set[int]:
        """Return the numbers of the lines that have answers."""
        return await self._database.run(_answered, batch_id)

    async def add_answer(
        self, batch_id: str, line: int, answer: dict[str, Any], *, is_good: bool
    ) -> None:
        """Store the answer to a line, unless it has one; it is committed when this returns."""
        usage = ((answer["response"] or {}).get("body") or {}).get("usage") or {}
        row = (batch_id, line, is_good, msgspec.json.encode(answer) + b"\n", *_tokens(usage))
        await self._database.run(_add_answer, row)

    async def counts(self, record: BatchRecord) -> Counts:
        """Return the counts over the answers so far."""
        if record.counts is not None:
            return record.counts
        return await self._database.run(_counts, record.id)

    async def write_files(self, record: BatchRecord, now: int) -> None:
        """Write successful answers to one file and failed ones to another; set `record.counts`.

        An empty file is not written. A repeated call gives the same file ids.
        """
        await self._database.run(self._write_files, record, now)

    async def clean(self) -> None:
        """Delete the answers of finished batches, which are in files now."""
        await self._database.run(_clean)

    def _write_files(self, connection: sqlite3.Connection, record: BatchRecord, now: int) -> None:
        stem = record.id.removeprefix("batch_")
        expiry_s = record.output_expiry_s
        for is_good, word in ((1, "output"), (0, "error")):
            found = "FROM results WHERE batch_id = ? AND is_good = ?"
            given = (record.id, is_good)
            if connection.execute(f"SELECT 1 {found} LIMIT 1", given).fetchone() is None:
                continue
            file = StoredFile(
                f"file-{word}{stem}",
                record.tenant,
                f"{record.id}_{word}.jsonl",
                OUTPUT,
                0,
                now,
                None if expiry_s is None else now + expiry_s,
            )
            rows = connection.execute(f"SELECT answer {found} ORDER BY line", given)
            self._files.write(connection, file, (answer for (answer,) in rows))
            setattr(record, f"{word}_file_id", file.id)
        record.counts = _counts(connection, record.id)


def _put(connection: sqlite3.Connection, record: BatchRecord, max_over: int) -> None:
    encoded = msgspec.json.encode(record)
    connection.execute(
        "INSERT INTO batches VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
        "is_over = excluded.is_over, record = excluded.record",
        (record.id, record.tenant, record.status in OVER, encoded),
    )
    if record.status in OVER:
        over = "FROM batches WHERE tenant = ? AND is_over"
        last = f"SELECT rowid {over} ORDER BY rowid DESC LIMIT 1 OFFSET ?"
        connection.execute(
            f"DELETE {over} AND rowid <= ({last})", (record.tenant, record.tenant, max_over)
        )


class _Named(NamedTuple):
    id: str


def _page(connection: sqlite3.Connection, tenant: str, page: Page) -> list[BatchRecord]:
    ids = connection.execute("SELECT id FROM batches WHERE tenant = ? ORDER BY rowid", (tenant,))
    # Only the records of the page are read, because there may be thousands.
    found = page.of([_Named(*row) for row in ids])
    return [record for each in found for record in _select(connection, "id = ?", (each.id,))]


def _select(
    connection: sqlite3.Connection, where: str, given: tuple[str, ...]
) -> list[BatchRecord]:
    rows = connection.execute(f"SELECT record FROM batches WHERE {where} ORDER BY rowid", given)
    return [_DECODER.decode(record) for (record,) in rows]


def _answered(connection: sqlite3.Connection, batch_id: str) -> set[int]:
    rows = connection.execute("SELECT line FROM results WHERE batch_id = ?", (batch_id,))
    return {line for (line,) in rows}


def _add_answer(connection: sqlite3.Connection, row: tuple[Any, ...]) -> None:
    connection.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def _clean(connection: sqlite3.Connection) -> None:
    running = "SELECT id FROM batches WHERE NOT is_over"
    connection.execute(f"DELETE FROM results WHERE batch_id NOT IN ({running})")


def _counts(connection: sqlite3.Connection, batch_id: str) -> Counts:
    sums = connection.execute(
        "SELECT TOTAL(is_good), TOTAL(NOT is_good), TOTAL(input_tokens), TOTAL(cached_tokens), "
        "TOTAL(output_tokens), TOTAL(reasoning_tokens) FROM results WHERE batch_id = ?",
        (batch_id,),
    ).fetchone()
    return Counts(*map(int, sums))


def _tokens(usage: dict[str, Any]) -> Iterator[int]:
    """Yield the numbers of input, cached, output and reasoning tokens in any route's `usage`."""
    for word, detail in (("input", "cached_tokens"), ("output", "reasoning_tokens")):
        other = {"input": "prompt", "output": "completion"}[word]
        yield int(usage.get(f"{word}_tokens", usage.get(f"{other}_tokens")) or 0)
        details = usage.get(f"{word}_tokens_details") or usage.get(f"{other}_tokens_details") or {}
        yield int(details.get(detail) or 0)
