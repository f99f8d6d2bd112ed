"""Declares bounds of a body's fields in the OpenAPI document, without checking them.

The decoder does not check these bounds, because its message would not contain the wrong value and
the allowed values. Also, the error for a wrong value has another body than the error for malformed
JSON. The code that checks a field uses the same constants as its declaration.
"""

from __future__ import annotations

from typing import Any

import msgspec


def within(
    low: float | None = None, high: float | None = None, *, above: float | None = None
) -> msgspec.Meta:
    """Declare a number: at least `low`, or greater than `above`; at most `high`."""
    keys = {"minimum": low, "maximum": high, "exclusiveMinimum": above}
    return _documented(**{name: value for name, value in keys.items() if value is not None})


def at_most(items: int | None = None, *, chars: int | None = None) -> msgspec.Meta:
    """Declare a list of at most `items` entries, or a text of at most `chars` characters."""
    keys = {"maxItems": items, "maxLength": chars}
    return _documented(**{name: value for name, value in keys.items() if value is not None})


def one_of(*values: object) -> msgspec.Meta:
    """Declare a field that takes one of `values`."""
    return _documented(enum=list(values))


def _documented(**keys: Any) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema=keys)
