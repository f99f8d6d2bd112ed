"""Bounds of the fields of a request's body, for the OpenAPI document.

They are told here and not checked by the decoder: its message would have neither the value nor all
that is allowed, and a refused value has another body than a malformed one. What checks a field uses
the same constants.
"""

from __future__ import annotations

from typing import Any

import msgspec


def within(
    low: float | None = None, high: float | None = None, *, above: float | None = None
) -> msgspec.Meta:
    """A number of at least `low`, or more than `above`, and at most `high`."""
    keys = {"minimum": low, "maximum": high, "exclusiveMinimum": above}
    return _documented(**{name: value for name, value in keys.items() if value is not None})


def at_most(items: int | None = None, *, chars: int | None = None) -> msgspec.Meta:
    """A list of so many `items`, or a text of so many `chars`."""
    keys = {"maxItems": items, "maxLength": chars}
    return _documented(**{name: value for name, value in keys.items() if value is not None})


def one_of(*values: object) -> msgspec.Meta:
    """One of the few `values`."""
    return _documented(enum=list(values))


def _documented(**keys: Any) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema=keys)
