"""A progress bar on standard error, drawn only on a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 30
_PERIOD_S = 0.1


class Progress:
    """Counts completed items out of `total`."""

    def __init__(self, total: int, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        """Draw on `stream` (by default standard error) if it is a terminal and `enabled`."""
        self._stream = stream or sys.stderr
        self._enabled = enabled and self._stream.isatty()
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._drawn = 0.0

    def add(self, count: int = 1) -> None:
        """Count `count` more completed items."""
        self._done += count
        now = time.monotonic()
        if self._enabled and (now - self._drawn > _PERIOD_S or self._done == self._total):
            self._drawn = now
            self._draw(now - self._started)

    def close(self) -> None:
        """Leave the bar on the terminal and end its line."""
        if self._enabled:
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, seconds: float) -> None:
        filled = _WIDTH * self._done // max(self._total, 1)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        rate = self._done / seconds if seconds else 0.0
        self._stream.write(f"\r[{bar}] {self._done}/{self._total}  {rate:.1f}/s  {seconds:.0f} s ")
        self._stream.flush()
