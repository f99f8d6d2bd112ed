"""Whether an answer is right: small predicates that the evaluation combines."""

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from recipes.demo_model.countries import COUNTRIES

Check = Callable[[str], bool]

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def says(text: str, lines: int | None = None) -> Check:
    """Whether the answer holds `text`, at most in its first `lines` lines, in any case."""

    def check(answer: str) -> bool:
        kept = answer if lines is None else "\n".join(answer.splitlines()[:lines])
        # Some cases request upper case, so case matters there.
        return text in kept if text.isupper() else text.lower() in kept.lower()

    return check


def ends_with_number(value: int) -> Check:
    """Whether the last number of the answer is `value`."""

    def check(answer: str) -> bool:
        numbers = re.findall(r"-?\d+", answer)
        return bool(numbers) and int(numbers[-1]) == value

    return check


def starts_with_number(value: int) -> Check:
    """Whether the first number of the answer is `value`."""

    def check(answer: str) -> bool:
        numbers = re.findall(r"-?\d+", answer)
        return bool(numbers) and int(numbers[0]) == value

    return check


def _items(answer: str) -> list[str] | None:
    """The entries of a list numbered from 1, or None when it is not one."""
    items = []
    for index, line in enumerate(answer.strip().splitlines(), 1):
        if not line.startswith(f"{index}. "):
            return None
        items.append(line.split(". ", 1)[1])
    return items


def is_list(count: int, known: Collection[str]) -> Check:
    """Whether the answer numbers `count` different entries out of `known`."""

    def check(answer: str) -> bool:
        items = _items(answer)
        return (
            items is not None
            and len(items) == len(set(items)) == count
            and all(item in known for item in items)
        )

    return check


def is_pair_list(count: int, without: Collection[str] = ()) -> Check:
    """Whether the answer numbers `count` true pairs `country - capital`, none in `without`."""
    true_pairs = {f"{country.bare} - {country.capital}" for country in COUNTRIES}

    def check(answer: str) -> bool:
        items = _items(answer) or []
        fresh = all(item.split(" - ")[0] not in without for item in items)
        return is_list(count, true_pairs)(answer) and fresh

    return check


def thinks(check_answer: Check) -> Check:
    """Whether the answer is a think block and then something that passes `check_answer`."""

    def check(answer: str) -> bool:
        if not answer.startswith("<think>\n") or answer.count("</think>") != 1:
            return False
        thought, said = answer.removeprefix("<think>\n").split("</think>")
        return bool(thought.strip()) and check_answer(said)

    return check


def is_json(wanted: dict[str, Any]) -> Check:
    """Whether the answer is a JSON object that holds `wanted`."""

    def check(answer: str) -> bool:
        try:
            found = json.loads(answer)
        except json.JSONDecodeError:
            return False
        return isinstance(found, dict) and wanted.items() <= found.items()

    return check


def calls(name: str, arguments: dict[str, Any]) -> Check:
    """Whether the answer is one call of `name` with exactly `arguments`."""

    def check(answer: str) -> bool:
        found = _CALL.findall(answer)
        if len(found) != 1:
            return False
        try:
            return bool(json.loads(found[0]) == {"name": name, "arguments": arguments})
        except json.JSONDecodeError:
            return False

    return check


def no_call(check_answer: Check) -> Check:
    """Whether the answer calls nothing and passes `check_answer`."""
    return lambda answer: "<tool_call>" not in answer and check_answer(answer)
