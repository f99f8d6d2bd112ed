"""Decides which tests `make test` omits because others show the same; `make test-long` runs all.

A test that is marked `long` is the long form of others. Of a table with three axes or more that is
marked `pairs`, some rows are enough in which each value of an axis meets each value of every other
axis: most faults depend on one value or on two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, TypeVar

import pytest

Row = TypeVar("Row", bound=Hashable)


class _Value(NamedTuple):
    """A value of an axis; those of one table are the same objects in all rows."""

    axis: tuple[str, ...]
    ids: tuple[int, ...]


def keep_short_forms(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the long forms from `items`, unless `--long` or a node id requests them."""
    if config.getoption("long") or any("::" in argument for argument in config.args):
        return
    omitted = {item for item in items if item.get_closest_marker("long") is not None}
    omitted.update(_rows_beyond_pairs([item for item in items if item not in omitted]))
    if omitted:
        config.hook.pytest_deselected(items=[item for item in items if item in omitted])
        items[:] = [item for item in items if item not in omitted]


def _rows_beyond_pairs(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    tables: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("pairs")
        if mark is not None and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            each = [id(item.callspec.params.get(name)) for name in mark.kwargs.get("each", ())]
            tables[(item.parent, item.originalname, *each)].append(item)
    for rows in tables.values():
        rows.sort(key=lambda row: row.nodeid)
        kept = with_all_pairs({row: [*_values(row)] for row in rows})
        yield from (row for row in rows if row not in kept)


def with_all_pairs(rows: Mapping[Row, Sequence[object]]) -> set[Row]:
    """Return few rows in which all pairs of values occur: each time the row with the most new ones.

    Args:
        rows: the values of each row, one of each axis; values of different axes are different.
    """
    pairs: dict[Row, set[object]] = {
        row: set(combinations(values, 2)) or set(values) for row, values in rows.items()
    }
    missing: set[object] = set().union(*pairs.values())
    kept = set()
    while missing:
        row = max(rows, key=lambda row: len(pairs[row] & missing))
        kept.add(row)
        missing -= pairs[row]
    return kept


def _values(row: pytest.Function) -> Iterator[_Value]:
    """Yield a row's value of each `parametrize`, then of each fixture with parameters."""
    parameters = dict(row.callspec.params)
    for mark in row.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        axis = tuple(names.replace(",", " ").split() if isinstance(names, str) else names)
        yield _Value(axis, tuple(id(parameters.pop(name)) for name in axis))
    for name, value in parameters.items():
        yield _Value((name,), (id(value),))
