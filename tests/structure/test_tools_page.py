"""`docs/tools.md` names every parser, and what grammars can do with its calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from openai_api.tool_parsers.registry import TOOL_PARSERS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tools.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first column has that heading."""
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_tool_parser_is_there() -> None:
    listed = [name for row in rows("tool-call parser") for name in names(row[0])]
    assert sorted(listed) == sorted(TOOL_PARSERS)
    for first, _, strict in rows("tool-call parser"):
        # Names in one row are one parser.
        (parser,) = {TOOL_PARSERS.load(name) for name in names(first)}
        form = parser.call_form
        enforced = "yes" if form is not None and form.style == "json" else "yes, xgrammar"
        expected = "not enforced" if form is None else enforced
        assert strict.strip() == expected, first


def test_every_reasoning_parser_is_there() -> None:
    listed = [name for row in rows("reasoning parser") for name in names(row[0])]
    assert sorted(listed) == sorted(REASONING_PARSERS)
    for first, _ in rows("reasoning parser"):
        assert len({REASONING_PARSERS.load(name) for name in names(first)}) == 1


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
def test_the_example_of_a_row_is_read(name: str) -> None:
    """Its first example begins a call of that parser, as the page says it is written."""
    (row,) = [row for row in rows("tool-call parser") if name in names(row[0])]
    markers = [
        marker for marker in TOOL_PARSERS.load(name).markers if marker.startswith(("<", "["))
    ]
    shown = row[1].replace("\\|", "|")
    assert any(marker in shown for marker in markers) or name == "pythonic"
