"""JSON schemas by keyword, with values that they allow and forbid, to test the grammar libraries.

The schemas are in `schema_cases.jsonl`. `tests/unit/grammar/test_schema_meaning.py` tries each schema
with each library, and compares the accepted values with `jsonschema` and with `Case.by`.
`docs.generate` makes a table of the schemas.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A schema, example values, and the libraries that support it.

    Attributes:
        keyword: the keyword of JSON Schema that this case is about.
        schema: the schema.
        good: values that the schema allows; their properties are in the order of the schema.
        bad: values that the schema forbids.
        by: names of the libraries that follow the schema exactly; empty if it is refused.
    """

    keyword: str
    schema: Any
    good: list[Any]
    bad: list[Any]
    by: list[str]


_LINES = (Path(__file__).parent / "schema_cases.jsonl").read_text(encoding="utf-8").splitlines()
CASES = [Case(**json.loads(line)) for line in _LINES]
