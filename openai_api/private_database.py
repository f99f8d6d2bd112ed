"""SQLite files with clients' data, which only the server's own user can read."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path


def connect(path: Path) -> sqlite3.Connection:
    """Open or create a database for threads that take turns; each statement commits at once.

    Raises:
        OSError: the file cannot be created.
        sqlite3.Error: the file is not a database.
    """
    # SQLite gives the files beside it the same permissions.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    return connection
