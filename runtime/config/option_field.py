"""A field of the configuration that is also a command-line option."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line option."""
    metadata = {"help": help_text, "choices": choices, "aliases": aliases, "metavar": metavar}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
