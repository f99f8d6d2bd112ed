"""Describes tool calls as structural-tag formats, from which a grammar is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai_api.tool_parsers.departures import BLANK, literal
from openai_api.tool_parsers.tool_parser import CallForm

Format = dict[str, Any]

_BLANKS = rf"[{BLANK}]*"


@dataclass(frozen=True)
class OfferedFunction:
    """A function that the model may call, and the JSON schema of its arguments."""

    name: str
    schema: dict[str, Any]


def text_with_calls(form: CallForm, functions: Sequence[OfferedFunction]) -> Format:
    """Describe free text with calls in it; each series of calls begins with a trigger text.

    In some formats, calls at the beginning of the output need no trigger. Then an output with any
    other beginning is free text.
    """
    rules: dict[str, list[Format]] = {}
    for each in (form, *form.others):
        rules.setdefault(each.trigger, []).append(_behind_trigger(each, functions))
    text: Format = {
        "type": "dispatch",
        "rules": [[trigger, _either(formats)] for trigger, formats in rules.items()],
    }
    if form.no_call is None:
        return text
    beginning = _pattern(form.no_call([each.name for each in functions]))
    otherwise = _sequence([*beginning, {**text, "loop": False}])
    return _either([*_pattern(_BLANKS), _at_start(form, functions), otherwise])


def calls_alone(form: CallForm, functions: Sequence[OfferedFunction]) -> Format:
    """Describe an output of one or more calls without other text."""
    return _either([_alone(each, functions) for each in (form, *form.others)])


def _alone(form: CallForm, functions: Sequence[OfferedFunction]) -> Format:
    if form.closing is None:
        return _separated(form, [_call(form, each, form.trigger) for each in functions])
    return _sequence([*_text(form.trigger), _behind_trigger(form, functions)])


def _behind_trigger(form: CallForm, functions: Sequence[OfferedFunction]) -> Format:
    calls = [_call(form, each) for each in functions]
    if form.closing is None:
        return _either(calls)
    return _sequence([*_pattern(form.opening), _separated(form, calls), *_text(form.closing)])


def _at_start(form: CallForm, functions: Sequence[OfferedFunction]) -> Format:
    """Describe a series of calls at the beginning of the output, where it needs no trigger."""
    # One regular expression covers the whitespace and the beginning of the call, because llguidance
    # does not reconsider an expression once it has matched.
    first = [
        _sequence(
            [
                *_pattern(_BLANKS + literal(form.begin(each.name))),
                _arguments(form, each),
                *_text(form.end),
            ]
        )
        for each in functions
    ]
    others = _separated(form, [_call(form, each) for each in functions])
    more = {"type": "optional", "content": _sequence([*_text(form.separator), others])}
    return _sequence([_either(first), more, *_text(form.closing or "")])


def _separated(form: CallForm, calls: list[Format]) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": form.separator,
        "at_least_one": True,
    }


def _call(form: CallForm, function: OfferedFunction, trigger: str = "") -> Format:
    return {
        "type": "tag",
        "begin": trigger + form.begin(function.name),
        "content": _sequence([*_pattern(form.between), _arguments(form, function)]),
        "end": form.end,
    }


def _arguments(form: CallForm, function: OfferedFunction) -> Format:
    content: Format = {"type": "json_schema", "json_schema": function.schema}
    if form.style != "json":
        content["style"] = form.style
    return content


def _text(text: str) -> list[Format]:
    return [{"type": "const_string", "value": text}] if text else []


def _pattern(pattern: str) -> list[Format]:
    return [{"type": "regex", "pattern": pattern}] if pattern else []


def _sequence(parts: list[Format]) -> Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _either(formats: list[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}
