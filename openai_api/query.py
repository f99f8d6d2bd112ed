"""Parses parameters of a route's query string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.errors import InvalidRequest


def flag_in(query: Mapping[str, str], name: str) -> bool:
    """Read a parameter that is true or false; false if it is absent.

    Raises:
        InvalidRequest: the parameter is neither true nor false.
    """
    return word_in(query, name, ("true", "false")) == "true"


def word_in(query: Mapping[str, str], name: str, allowed: Sequence[str]) -> str | None:
    """Read a parameter that is one of `allowed`; None if it is absent.

    Raises:
        InvalidRequest: the parameter is not one of `allowed`.
    """
    found = query.get(name)
    if found is not None and found not in allowed:
        raise InvalidRequest(
            f"{name} must be {' or '.join(allowed)}, got {found[:64]!r}.", param=name
        )
    return found


def number_in(query: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    """Read a parameter that is a whole number; None if it is absent.

    Raises:
        InvalidRequest: the parameter is not a number, or is out of bounds.
    """
    found = query.get(name)
    if found is None:
        return None
    # A number with 20 digits or more is above every bound, like the -1 that stands for it.
    number = int(found) if found.isascii() and found.isdecimal() and len(found) < 20 else -1
    if not least <= number <= most:
        raise InvalidRequest(
            f"{name} must be a number in [{least}, {most}], got {found[:64]!r}.", param=name
        )
    return number
