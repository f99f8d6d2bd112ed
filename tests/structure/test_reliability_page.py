"""Pages that name tests have every number, and each test that they name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
LANGUAGE = (ROOT / "docs" / "lang_checks.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE + LANGUAGE)))
# A row for a number, and more rows for it without one.
ROW = re.compile(r"^\| (\d*) ?\|(.*)\|$", re.MULTILINE)


@pytest.mark.parametrize(("path", "name"), NAMED, ids="::".join)
def test_a_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / "tests" / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert name in {each.name for each in tree.body if isinstance(each, functions)}
    assert name.startswith("test_")


@pytest.mark.parametrize(
    ("heading", "count"), [("## Probes", 43), ("## Faults", 25), ("## Checks", 77)]
)
def test_every_number_says_what_shows_it(heading: str, count: int) -> None:
    part = f"{PAGE}\n{LANGUAGE}".partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    rows = ROW.findall(part)
    assert [int(number) for number, _ in rows if number] == list(range(1, count + 1))
    for _, row in rows:
        last = re.split(r"(?<!\\)\|", row)[-1]
        assert "::" in last or "missing: " in last or "gap" in last, row


def test_what_names_a_test_is_read() -> None:
    for page in (PAGE, LANGUAGE):
        assert page.count("::") == len(re.findall(r"`[\w/]+\.py::\w+`", page))
    assert len(NAMED) > 60
