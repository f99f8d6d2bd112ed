"""What was left to us, as lines of the log."""

from __future__ import annotations

from typing import Any


class Choices:
    """Values that were picked, each with its reason."""

    def __init__(self) -> None:
        """Nothing is picked yet."""
        self.lines: list[str] = []

    def pick(self, name: str, value: Any, reason: str) -> Any:
        """Return `value`; a line says why, where there is a reason."""
        # What was asked for is no choice of ours.
        if reason:
            self.lines.append(f"{name}: {value} ({reason})")
        return value
