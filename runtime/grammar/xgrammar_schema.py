"""JSON schemas as xgrammar reads them best."""

from __future__ import annotations

from typing import Any

from runtime.grammar.grammar_backend import GrammarError
from runtime.grammar.schema_map import with_each

# Longer strings cost seconds to compile, whatever the vocabulary.
MAX_COUNTED_CHARS = 4096
# The formats that xgrammar 0.2.8 follows, with the characters of their shortest and longest texts;
# `None` for no end. The others are remarks.
_FORMATS: dict[str, tuple[int, int | None]] = {
    "date": (10, 10),
    "date-time": (20, None),
    "duration": (3, None),
    "email": (3, None),
    "hostname": (1, None),
    "ipv4": (7, 15),
    "ipv6": (2, 45),
    "json-pointer": (0, None),
    "relative-json-pointer": (1, None),
    "time": (9, None),
    "uri": (2, None),
    "uri-reference": (0, None),
    "uri-template": (0, None),
    "uuid": (36, 36),
}
# What bounds a text of a format without an end: less is a bound that an answer may meet. Clients
# send 2,083 with every URL.
_FAR = 2048


def lengths_as_patterns(schema: Any) -> Any:
    """A copy of a checked schema in which `minLength` and `maxLength` are written as a `pattern`.

    Beside a format it reads none of them: those that hold for every text of the format go.

    xgrammar 0.2.8 lets raw control characters into a string of bounded length, so that it is no
    JSON, and compiles it ten times more slowly than the pattern that says the same.

    Raises:
        GrammarError: a length is beyond what the library can count to, or narrows a format.
    """
    return with_each(schema, _length_as_pattern)


def _length_as_pattern(copy: dict[str, Any]) -> None:
    if "minLength" in copy or "maxLength" in copy:
        least, most = copy.pop("minLength", 0), copy.pop("maxLength", None)
        if max(least, most or 0) > MAX_COUNTED_CHARS:
            raise GrammarError(f"a string's length may be bounded by at most {MAX_COUNTED_CHARS}")
        if most is not None and most < least:
            raise GrammarError("maxLength is below minLength")
        if (known := _FORMATS.get(copy.get("format", ""))) is not None:
            _check_format(copy["format"], *known, least, most)
            return
        copy.pop("format", None)
        # Values that are listed have their lengths already.
        if not {"enum", "const"} & copy.keys():
            copy["pattern"] = f"^[\\s\\S]{{{least},{'' if most is None else most}}}$"


def _check_format(
    name: str, shortest: int, longest: int | None, least: int, most: int | None
) -> None:
    """Refuse lengths that not every text of a format has."""
    if least > shortest or (most is not None and most < (longest or _FAR)):
        raise GrammarError(
            f"minLength and maxLength cannot narrow the format {name!r}: leave one of them out"
        )
