"""JSON schemas as llguidance reads them; what it would read otherwise is refused here."""

from __future__ import annotations

from typing import Any

from runtime.grammar.blanks import MAX_BLANKS
from runtime.grammar.grammar_backend import GrammarError
from runtime.grammar.schema_rewrite import rewritten

_OPTIONS = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{MAX_BLANKS}}}"}
# It counts in floating point.
_MAX_INTEGER = 2**53
# So far behind a whole number begins what is greater.
_BEHIND = 1e-9


def as_llguidance_schema(schema: Any) -> dict[str, Any]:
    """A checked schema in the form that the library follows to the letter, with our options.

    Raises:
        GrammarError: it has no such form; the keyword is named, with its place.
    """
    plain = rewritten(schema)
    if isinstance(plain, bool):
        plain = {} if plain else {"enum": []}
    _check_integers(plain, "#")
    _open_bounds(plain)
    return {**plain, "x-guidance": _OPTIONS}


def _open_bounds(part: Any) -> None:
    """Move bounds that are out and whole by a little, in place.

    Between 2 and 2.5 the library lets 2 pass, though it is out: the whole part is the same.
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
