"""SQLite files that hold what clients said: for the server's own user."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path


def connect(path: Path) -> sqlite3.Connection:
    """Open or make a database that threads take turns with; each statement is kept at once.

    Raises:
        OSError: the file cannot be made.
        sqlite3.Error: it is no database.
    """
    # What SQLite puts beside it has the rights of this one.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    return connection
