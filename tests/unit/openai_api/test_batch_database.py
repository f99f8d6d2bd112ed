"""The database of files and batches: its thread, and its closing."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from openai_api.batches.database import Database
from runtime.errors import EngineDead
from tests.support.waiting import until_in_loop


async def test_what_has_begun_ends_before_the_database_is_closed(tmp_path: Path) -> None:
    database = Database(tmp_path / "files")
    has_begun, may_go_on = threading.Event(), threading.Event()
    found: list[object] = []

    def work(connection: sqlite3.Connection) -> None:
        has_begun.set()
        may_go_on.wait(60)
        found.extend(connection.execute("SELECT COUNT(*) FROM batches").fetchone())

    caller = asyncio.create_task(database.run(work))
    await until_in_loop(has_begun.is_set)
    caller.cancel()
    closing = asyncio.create_task(database.close())
    await asyncio.wait([caller])
    assert not (await asyncio.wait([closing], timeout=0.05))[0]
    may_go_on.set()
    await closing
    assert found == [0]
    with pytest.raises(EngineDead, match="shutting down"):
        await database.run(work)
    # Another server can have it.
    await Database(tmp_path / "files").close()
