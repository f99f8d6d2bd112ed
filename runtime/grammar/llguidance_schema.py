"""Converts JSON schemas for llguidance, and refuses schemas that llguidance would misread."""

from __future__ import annotations

from typing import Any

from runtime.grammar.blanks import MAX_BLANKS
from runtime.grammar.grammar_backend import GrammarError
from runtime.grammar.schema_rewrite import rewritten

_OPTIONS = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{MAX_BLANKS}}}"}
# The library computes with floating-point numbers, which are exact up to here.
_MAX_INTEGER = 2**53
# A bound that differs from an integer by this much stands for an exclusive bound.
_BEHIND = 1e-9


def as_llguidance_schema(schema: Any) -> dict[str, Any]:
    """Return a checked schema in a form that llguidance follows exactly.

    The result also has options for llguidance, such as a limit on blanks.

    Raises:
        GrammarError: the schema has no such form; the message names the keyword and its position.
    """
    plain = rewritten(schema)
    if isinstance(plain, bool):
        plain = {} if plain else {"enum": []}
    _check_integers(plain, "#")
    _open_bounds(plain)
    return {**plain, "x-guidance": _OPTIONS}


def _open_bounds(part: Any) -> None:
    """Shift exclusive integer bounds by a small number, in place.

    With the exclusive minimum 2 and the maximum 2.5, for example, the library would accept 2,
    because both bounds have the same integer part.
    """
    for each in part if isinstance(part, list) else ():
        _open_bounds(each)
    if not isinstance(part, dict):
        return
    for key, step in (("exclusiveMinimum", _BEHIND), ("exclusiveMaximum", -_BEHIND)):
        if isinstance(part.get(key), int | float) and part[key] == round(part[key]):
            part[key] += step
    for key, each in part.items():
        if key != "enum":
            _open_bounds(each)


def _check_integers(part: Any, path: str) -> None:
    if isinstance(part, int) and abs(part) > _MAX_INTEGER:
        raise GrammarError(f"at {path[:200]}: an integer beyond 2^53")
    inner = enumerate(part) if isinstance(part, list) else ()
    for key, each in part.items() if isinstance(part, dict) else inner:
        _check_integers(each, f"{path}/{key}")
