"""Checks a grammar of a request before it is compiled. The checks are cheap and need no torch."""

from __future__ import annotations

from typing import Any

from runtime.errors import InvalidRequest
from runtime.grammar.regex_check import check_regex
from runtime.grammar.schema_check import MAX_SCHEMA_DEPTH, check_schema, parse_json
from runtime.requests.sampling_params import GrammarSpec

MAX_EBNF_CHARS = 64 * 1024
MAX_EBNF_DEPTH = 64
MAX_TAG_NODES = 20_000


def check_grammar(spec: GrammarSpec) -> None:
    """Refuse a grammar that is clearly invalid or too large.

    Raises:
        InvalidRequest: the grammar is refused; the message names the field and the error.
    """
    match spec.kind:
        case "json_schema":
            check_schema(parse_json(spec.text, spec.kind))
        case "regex":
            check_regex(spec.text)
        case "ebnf":
            _check_ebnf(spec.text)
        case "structural_tag":
            _check_tag(parse_json(spec.text, spec.kind))


def _check_ebnf(text: str, name: str = "ebnf") -> None:
    if len(text) > MAX_EBNF_CHARS:
        raise InvalidRequest(
            f"{name} may have at most {MAX_EBNF_CHARS} characters, got {len(text)}.", param=name
        )
    depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth > MAX_EBNF_DEPTH:
            raise InvalidRequest(f"{name} may nest at most {MAX_EBNF_DEPTH} brackets.", param=name)


def _check_tag(tag: Any) -> None:
    if not isinstance(tag, dict):
        raise InvalidRequest("structural_tag must be a JSON object.", param="structural_tag")
    if "structures" in tag and not _is_legacy_tag(tag):
        raise InvalidRequest(
            "structural_tag needs structures, a list of {begin, schema, end}, and triggers, a "
            "list of strings.",
            param="structural_tag",
        )
    stack: list[tuple[Any, int]] = [(tag, 0)]
    num_nodes = 0
    while stack:
        node, depth = stack.pop()
        num_nodes += 1
        if depth > MAX_SCHEMA_DEPTH or num_nodes > MAX_TAG_NODES:
            raise InvalidRequest(
                f"structural_tag may nest at most {MAX_SCHEMA_DEPTH} deep and have at most "
                f"{MAX_TAG_NODES} parts.",
                param="structural_tag",
            )
        if isinstance(node, list):
            stack += [(each, depth + 1) for each in node]
        elif isinstance(node, dict):
            for key, value in node.items():
                if key in ("json_schema", "schema") and isinstance(value, dict | bool):
                    check_schema(value, "structural_tag")
                elif key == "pattern" and isinstance(value, str):
                    check_regex(value, "structural_tag")
                elif key == "grammar" and isinstance(value, str):
                    _check_ebnf(value, "structural_tag")
                else:
                    stack.append((value, depth + 1))


def _is_legacy_tag(tag: dict[str, Any]) -> bool:
    structures, triggers = tag["structures"], tag.get("triggers")
    return (
        isinstance(structures, list)
        and isinstance(triggers, list)
        and all(isinstance(each, str) for each in triggers)
        and all(
            isinstance(each, dict)
            and isinstance(each.get("begin"), str)
            and isinstance(each.get("end"), str)
            and "schema" in each
            for each in structures
        )
    )
