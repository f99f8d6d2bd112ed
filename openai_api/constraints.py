"""Reads the constraint on an answer from the fields that can set one; a request has at most one.

A field that comes from another server's API means what it means there. An unsupported field is
refused, because an answer that ignores its constraint is worse than an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from openai_api.response_format import ANY_OBJECT, constraint_of, json_text
from openai_api.schemas.common import GenerationFields
from runtime.errors import InvalidRequest
from runtime.requests.sampling_params import GrammarKind, GrammarSpec

_HINT = "response_format says what an answer must look like"
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}

# Reads one field: takes its value, and its name for errors; returns `None` for no constraint.
_Reader = Callable[[Any, str], GrammarSpec | None]


def _text_of(kind: GrammarKind) -> _Reader:
    def read(value: Any, name: str) -> GrammarSpec:
        if not isinstance(value, str):
            raise _refused(name, "must be a string")
        return GrammarSpec(kind, value)

    return read


def _json_of(kind: GrammarKind) -> _Reader:
    def read(value: Any, name: str) -> GrammarSpec:
        if not isinstance(value, str | dict):
            raise _refused(name, "must be an object, or its JSON as a string")
        return GrammarSpec(kind, value if isinstance(value, str) else json_text(value, name))

    return read


def _choice(value: Any, name: str) -> GrammarSpec:
    if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
        raise _refused(name, "must be a list of at least one string")
    return GrammarSpec("ebnf", "root ::= " + " | ".join(map(_quoted, value)))


def _quoted(text: str) -> str:
    escaped = [
        _ESCAPES.get(char) or (char if char >= " " and char != "\x7f" else f"\\x{ord(char):02x}")
        for char in text
    ]
    return f'"{"".join(escaped)}"'


def _any_object(value: Any, name: str) -> GrammarSpec | None:
    if not isinstance(value, bool):
        raise _refused(name, "must be true or false")
    return GrammarSpec("json_schema", ANY_OBJECT) if value else None


def _structured_outputs(value: Any, name: str) -> GrammarSpec | None:
    return _only_one(value, _STRUCTURED_OUTPUTS, f"{name}.")


def _not_done(value: Any, name: str) -> None:
    if value:
        raise _refused(name, f"is not supported by this server; {_HINT}")


def _ignored(value: Any, name: str) -> None:
    """Ignore a field that chooses the grammar library, because the answer does not depend on it."""


_FIELDS: dict[str, _Reader] = {
    "response_format": lambda value, _: constraint_of(value),
    # Fields of SGLang.
    "json_schema": _json_of("json_schema"),
    "regex": _text_of("regex"),
    "ebnf": _text_of("ebnf"),
    "structural_tag": _json_of("structural_tag"),
    # Fields of llama.cpp.
    "grammar": _text_of("ebnf"),
    # Fields of vLLM, the older ones first.
    "guided_json": _json_of("json_schema"),
    "guided_regex": _text_of("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text_of("ebnf"),
    "guided_whitespace_pattern": _not_done,
    "structured_outputs": _structured_outputs,
}
_values = attrgetter(*_FIELDS)
_STRUCTURED_OUTPUTS: dict[str, _Reader] = {
    "json": _json_of("json_schema"),
    "regex": _text_of("regex"),
    "choice": _choice,
    "grammar": _text_of("ebnf"),
    "json_object": _any_object,
    "structural_tag": _json_of("structural_tag"),
    "disable_any_whitespace": _not_done,
    "disable_additional_properties": _not_done,
    "whitespace_pattern": _not_done,
    "disable_fallback": _ignored,
    "_backend": _ignored,
    "_backend_was_auto": _ignored,
}


def requested_constraint(request: GenerationFields) -> GrammarSpec | None:
    """Return the constraint that a body sets; `None` if it sets none.

    Raises:
        InvalidRequest: there are several constraints, or one is malformed or unsupported.
    """
    values = _values(request)
    if values.count(None) == len(values):
        return None
    return _only_one(dict(zip(_FIELDS, values, strict=True)), _FIELDS, "")


def _only_one(
    given: Mapping[str, Any], readers: Mapping[str, _Reader], prefix: str
) -> GrammarSpec | None:
    found: dict[str, GrammarSpec] = {}
    for key, value in given.items():
        name = prefix + key[:64]
        # An empty text means no constraint.
        if value is None or value == "":
            continue
        if key not in readers:
            known = ", ".join(each for each, read in readers.items() if read is not _ignored)
            raise _refused(name, f"is not known; known are {known}, and {_HINT}")
        spec = readers[key](value, name)
        if spec is not None:
            found[name] = spec
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequest(
            f"Only one constraint is allowed, got {first} and {second}.", param=first
        )
    return next(iter(found.values()), None)


def _refused(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {what}.", param=name)
