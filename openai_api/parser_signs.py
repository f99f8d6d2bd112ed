"""Finds the parser for a model by signs in the model's files; each parser declares its signs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Signs:
    """Signs that a model writes in the format that a parser reads.

    Attributes:
        template: texts, all of which the chat template must contain as constants. Without any, the
            parser is never chosen by the template. Of several matching parsers, the one with the
            most texts is chosen.
        response: keys and values. The field that the parser reads must have all of them in the
            `response_template` of tokenizer_config.json.
    """

    template: tuple[str, ...] = ()
    response: Mapping[str, str] = field(default_factory=dict)


def fields_of(template: Mapping[str, Any], names: Iterable[str]) -> list[Mapping[str, Any]]:
    """Return those fields of a model's `response_template` that have one of `names`, unchecked."""
    described = template.get("fields")
    if not isinstance(described, dict):
        return []
    return [each for name in names if isinstance(each := described.get(name), dict)]


def by_response_template(
    candidates: Mapping[str, Signs], fields: Iterable[Mapping[str, Any]]
) -> str | None:
    """Return the name of the first candidate whose `response` signs are all in one of `fields`.

    Returns `None` if there is no such candidate.
    """
    found = list(fields)
    for name, signs in candidates.items():
        if signs.response and any(
            all(_holds(each.get(key), value) for key, value in signs.response.items())
            for each in found
        ):
            return name
    return None


def by_chat_template(candidates: Mapping[str, Signs], written: str) -> str | None:
    """Return the candidate with the most `template` signs, if all are in `written`; else None."""
    fitting = {
        name: len(signs.template)
        for name, signs in candidates.items()
        if signs.template and all(sign in written for sign in signs.template)
    }
    return max(fitting, key=lambda name: fitting[name], default=None)


def _holds(given: object, wanted: str) -> bool:
    return given == wanted or (isinstance(given, list) and wanted in given)
