"""Opens SQLite files with clients' data, which only the server's own user can read."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path


def connect(path: Path) -> sqlite3.Connection:
    """Open a database, or create it; each statement is committed at once.

    Several threads may use the connection, one at a time.

    Raises:
        OSError: the file cannot be created.
        sqlite3.Error: the file is not a database.
    """
    # The file is created with its permissions first; SQLite's further files get the same ones.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    return connection
