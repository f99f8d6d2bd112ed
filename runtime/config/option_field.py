"""Declares a configuration field that is also a command-line option."""

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
    """Return a dataclass field that is also a command-line option.

    Args:
        default: value if the option is absent.
        help_text: text of the option in `--help` and in the docs.
        choices: the allowed values; `None` for any.
        aliases: further names of the option.
        metavar: placeholder of the value in `--help`; `None` for a default.
    """
    metadata = {"help": help_text, "choices": choices, "aliases": aliases, "metavar": metavar}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
