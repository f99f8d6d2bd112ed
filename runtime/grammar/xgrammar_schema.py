"""JSON schemas as xgrammar reads them best."""

from __future__ import annotations

from typing import Any

from runtime.grammar.grammar_backend import GrammarError
from runtime.grammar.schema_map import with_each

# Longer strings cost seconds to compile, whatever the vocabulary.
MAX_COUNTED_CHARS = 4096


def lengths_as_patterns(schema: Any) -> Any:
    """A copy of a checked schema in which `minLength` and `maxLength` are written as a `pattern`.

    xgrammar 0.2.8 lets raw control characters into a string of bounded length, so that it is no
    JSON, and compiles it ten times more slowly than the pattern that says the same.

    Raises:
        GrammarError: a length is beyond what the library can count to.
    """
    return with_each(schema, _length_as_pattern)


def _length_as_pattern(copy: dict[str, Any]) -> None:
    if "minLength" in copy or "maxLength" in copy:
        least, most = copy.pop("minLength", 0), copy.pop("maxLength", None)
        if max(least, most or 0) > MAX_COUNTED_CHARS:
            raise GrammarError(f"a string's length may be bounded by at most {MAX_COUNTED_CHARS}")
        if most is not None and most < least:
            raise GrammarError("maxLength is below minLength")
        # Values that are listed, and formats, have their lengths already.
        if not {"enum", "const", "format"} & copy.keys():
            copy["pattern"] = f"^[\\s\\S]{{{least},{'' if most is None else most}}}$"
