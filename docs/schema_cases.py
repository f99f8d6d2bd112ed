"""JSON schemas by keyword, with values that they allow and forbid: what the libraries are held to.

They stand in `schema_cases.jsonl`. `tests/unit/grammar/test_schema_meaning.py` walks through each
with each library, and holds what it finds against `jsonschema` and against `by` below;
`docs.generate` makes a table of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A schema, and what becomes of it.

    Attributes:
        keyword: what it is a case of.
        schema: the schema.
        good: values that it allows, whose properties come in the order in which they are said.
        bad: values that it forbids.
        by: names of the libraries that follow it; empty where it is refused.
    """

    keyword: str
    schema: Any
    good: list[Any]
    bad: list[Any]
    by: list[str]


_LINES = (Path(__file__).parent / "schema_cases.jsonl").read_text(encoding="utf-8").splitlines()
CASES = [Case(**json.loads(line)) for line in _LINES]
