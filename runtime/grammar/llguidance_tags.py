"""Translates structural tags into llguidance's dialect of Lark.

A structural tag is a format, defined by xgrammar, in which free text is mixed with parts that
follow a grammar. Only formats that describe text are translated; others are refused by name.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

from runtime.grammar.grammar_backend import GrammarError
from runtime.grammar.llguidance_schema import as_llguidance_schema

_SLASH = re.compile(r"(\\.)|(/)|(\n)", re.DOTALL)


def tag_to_grammar(text: str) -> str:
    """Translate a checked structural tag.

    It has either `format`, or `structures` and `triggers`.

    Raises:
        GrammarError: llguidance has no counterpart for a part of the tag.
    """
    tag = orjson.loads(text)
    if "structures" in tag:
        triggers = tag["triggers"]
        tags = [
            {
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each["schema"]},
                "end": each["end"],
            }
            for each in tag["structures"]
        ]
        return _triggered({"triggers": triggers, "tags": tags})
    form = tag.get("format")
    if isinstance(form, dict) and form.get("type") == "triggered_tags":
        return _triggered(form)
    if isinstance(form, dict) and form.get("type") == "dispatch":
        return _dispatched(form)
    return LLMatcher.grammar_from_lark(_rules(form))


def _rules(form: Any) -> str:
    lark = _Lark()
    start = lark.of(form)
    return "\n".join([f"start: {start}", *lark.rules, ""])


class _Lark:
    """Translates formats of structural tags into Lark expressions.

    Attributes:
        rules: additional Lark rules to which the expressions refer.
    """

    def __init__(self) -> None:
        self.rules: list[str] = []

    def of(self, form: Any) -> str:
        """Return the Lark expression for a format."""
        if not isinstance(form, dict):
            raise GrammarError("a format must be an object with a type")
        match form.get("type"):
            case "const_string":
                return _text(form.get("value"))
            case "json_schema":
                schema = as_llguidance_schema(_json_only(form).get("json_schema"))
                return "%json " + orjson.dumps(schema).decode()
            case "regex":
                return f"/{_SLASH.sub(_escaped, _string(form.get('pattern')))}/"
            case "grammar":
                return f"%lark {{\n{gbnf_to_lark(_string(form.get('grammar')))}\n}}"
            case "sequence":
                return "( " + " ".join(map(self.of, _parts(form, "elements"))) + " )"
            case "or":
                return "( " + " | ".join(map(self.of, _parts(form, "elements"))) + " )"
            case "optional":
                return f"( {self.of(form.get('content'))} )?"
            case "tag":
                content = self.of(form.get("content"))
                return f"( {_text(form.get('begin'))} {content} {_text(form.get('end'))} )"
            case "tags_with_separator":
                return self._separated(form)
            case "dispatch":
                return self._dispatched_once(form)
            case other:
                raise GrammarError(
                    f"the format {str(other)[:40]!r} is not known to llguidance's backend"
                )

    def _separated(self, form: dict[str, Any]) -> str:
        # The tags become a rule, because the expression needs them twice and they may be large.
        name = f"part_{len(self.rules)}"
        self.rules.append("")
        place = len(self.rules) - 1
        tags = " | ".join(map(self.of, _parts(form, "tags")))
        self.rules[place] = f"{name}: {tags}"
        more = f"( {_text(form.get('separator'))} {name} )*"
        all_of_them = name if form.get("stop_after_first") else f"{name} {more}"
        return f"( {all_of_them} )" + ("" if form.get("at_least_one") else "?")

    def _dispatched_once(self, form: dict[str, Any]) -> str:
        """Return an expression for `dispatch` without a loop.

        The output is free text to its end, or free text up to a rule's text, then the rule's
        format.
        """
        if form.get("loop") is not False or form.get("excludes"):
            raise GrammarError(
                "within other formats llguidance's backend knows no loop of dispatch"
            )
        rules = _pairs(form)
        anything = r"(?s:.*)"
        begins = "|".join(_literal(text) for text, _ in rules)
        ways = [self._terminal(f"/{anything}/ & ~/{anything}({begins}){anything}/")]
        for text, inner in rules:
            first = f"/{anything}{_literal(text)}/ & ~/{anything}({begins})(?s:.+)/"
            ways.append(f"{self._terminal(first)} {self.of(inner)}")
        return "( " + " | ".join(ways) + " )"

    def _terminal(self, expression: str) -> str:
        name = f"TEXT_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name


def _literal(text: str) -> str:
    return _SLASH.sub(_escaped, re.escape(text))


def _triggered(form: dict[str, Any]) -> str:
    if form.get("at_least_one") or form.get("stop_after_first"):
        raise GrammarError(
            "at_least_one and stop_after_first are not known to llguidance's backend"
        )
    tags = []
    for tag in form.get("tags", ()):
        content = tag.get("content", {}) if isinstance(tag, dict) else {}
        begin = _string(tag.get("begin")) if isinstance(tag, dict) else ""
        trigger = next((each for each in form.get("triggers", ()) if begin.startswith(each)), None)
        if not trigger:
            raise GrammarError("every tag must begin with one of the triggers")
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "json_schema":
            inner: Any = as_llguidance_schema(_json_only(content).get("json_schema"))
        elif kind == "grammar":
            inner = gbnf_to_lark(_string(content.get("grammar")))
        else:
            inner = _rules(content)
        tags.append(
            StructTag(trigger=trigger, begin=begin, grammar=inner, end=_string(tag.get("end")))
        )
    if not tags:
        raise GrammarError("there must be at least one tag")
    grammar = StructTag.to_grammar(tags, assume_special=False)
    return grammar if grammar.startswith("{") else LLMatcher.grammar_from_lark(grammar)


def _dispatched(form: dict[str, Any]) -> str:
    """Return a grammar for `dispatch`: free text in which each rule's text precedes its format."""
    if form.get("loop") is False or form.get("excludes"):
        raise GrammarError("loop and excludes are not known to llguidance's backend")
    tags = [{"begin": text, "content": inner, "end": ""} for text, inner in _pairs(form)]
    return _triggered({"triggers": [tag["begin"] for tag in tags], "tags": tags})


def _pairs(form: dict[str, Any]) -> list[tuple[str, Any]]:
    rules = form.get("rules")
    if not isinstance(rules, list) or not rules:
        raise GrammarError("rules must be a list with at least one pair")
    for rule in rules:
        if not isinstance(rule, list) or len(rule) != 2 or not _string(rule[0]):
            raise GrammarError("a rule must be a text and a format")
    return [(text, inner) for text, inner in rules]


def _json_only(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("style", "json") != "json":
        raise GrammarError("a json_schema in another style is not known to llguidance's backend")
    return form


def _parts(form: dict[str, Any], key: str) -> list[Any]:
    parts = form.get(key)
    if not isinstance(parts, list) or not parts:
        raise GrammarError(f"{key} must be a list with at least one format")
    return parts


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise GrammarError("begin, end, value and pattern must be strings")
    return value


def _text(value: Any) -> str:
    return orjson.dumps(_string(value)).decode() if value else '""'


def _escaped(found: re.Match[str]) -> str:
    return found[1] or ("\\/" if found[2] else "\\n")
