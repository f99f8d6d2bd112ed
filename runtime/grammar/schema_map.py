"""A change to each schema inside a JSON schema, for libraries that want another spelling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.grammar.schema_check import LISTS, MAPS, SINGLE


def with_each(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy of a checked schema in which `change` was applied to each object, inner ones first.

    Args:
        schema: what `check_schema` let pass; values of `enum` and `const` are no schemas.
        change: alters the copy of an object, whose inner schemas are copies already.
    """
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key in MAPS:
        if key in copy:
            copy[key] = {name: with_each(each, change) for name, each in copy[key].items()}
    for key in LISTS:
        if key in copy:
            copy[key] = [with_each(each, change) for each in copy[key]]
    for key in (*SINGLE, "propertyNames"):
        if key in copy:
            copy[key] = with_each(copy[key], change)
    change(copy)
    return copy
