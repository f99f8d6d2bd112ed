"""Which rows of a batch share their first pages, and when that is determined."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.paged_attention.prefix_group import MAX_GROUPS, PrefixGroup
from runtime.executor.batch_rows import BatchRows
from runtime.executor.prefix_groups import PrefixGroups, find_groups
from runtime.step.step_plan import PageUpdate

PAGE = 16


def table_of(prefixes: list[tuple[list[int], int]], num_rows: int, width: int = 200) -> np.ndarray:
    """Rows with separate pages, except common ones of `prefixes` = [(rows, pages), ...]."""
    table = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width) + 1
    for rows, pages in prefixes:
        table[rows, :pages] = table[rows[0], :pages]
    return table


def found(groups: list[PrefixGroup]) -> list[tuple[list[int], int]]:
    return [(group.members.tolist(), group.length) for group in groups]


def test_rows_are_grouped_to_save_the_most() -> None:
    # All rows share a prefix, and some of them share a much longer one.
    table = table_of([(list(range(12)), 20), ([2, 3, 5, 7, 11], 150)], 14)
    batch = np.arange(14)
    lens = np.full(14, 190 * PAGE)
    assert found(find_groups(table, batch, lens, PAGE)) == [
        ([2, 3, 5, 7, 11], 150 * PAGE),
        ([0, 1, 4, 6, 8, 9, 10], 20 * PAGE),
    ]
    # Groups hold indices in the batch, not rows.
    batch = np.array([11, 12, 7, 5, 13, 3])
    assert found(find_groups(table, batch, lens[:6], PAGE)) == [([0, 2, 3, 5], 150 * PAGE)]


def test_a_long_prefix_of_all_is_worth_more_than_longer_ones_of_few() -> None:
    fours = [list(range(first, first + 4)) for first in range(0, 64, 4)]
    table = table_of([(rows, 130) for rows in fours], 64)
    table[:, :100] = table[0, :100]
    groups = find_groups(table, np.arange(64), np.full(64, 190 * PAGE), PAGE)
    assert found(groups) == [(list(range(64)), 100 * PAGE)]
    # Otherwise there are more groups than a step may have.
    table = table_of([(rows, 130) for rows in fours], 64)
    groups = find_groups(table, np.arange(64), np.full(64, 190 * PAGE), PAGE)
    assert found(groups) == [(rows, 130 * PAGE) for rows in fours[:MAX_GROUPS]]


@pytest.mark.parametrize(("length", "pages"), [(100 * PAGE + 1, 100), (100 * PAGE, 99)])
def test_the_newest_key_is_never_shared(length: int, pages: int) -> None:
    table = table_of([(list(range(4)), 150)], 4)
    lens = np.array([190 * PAGE, 180 * PAGE, length, 170 * PAGE])
    groups = find_groups(table, np.arange(4), lens, PAGE)
    assert found(groups) == [([0, 1, 2, 3], pages * PAGE)]


def test_few_rows_or_short_prefixes_form_no_group() -> None:
    lens = np.full(8, 190 * PAGE)
    for prefixes in ([([0, 3, 4], 150)], [(list(range(8)), 15)], []):
        assert not find_groups(table_of(prefixes, 8), np.arange(8), lens, PAGE)


def branch(table: np.ndarray, rows: np.ndarray, depth: int, rng: np.random.Generator) -> None:
    """Let `rows` share some pages from `depth` on, then split into two or three branches."""
    if len(rows) < 2 or depth >= table.shape[1]:
        return
    end = depth + int(rng.integers(1, 80))
    table[rows, depth:end] = table[rows[0], depth:end]
    for part in np.array_split(rng.permutation(rows), int(rng.integers(2, 4))):
        branch(table, part, end, rng)


def test_groups_are_correct_for_random_trees() -> None:
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(200):
        count = int(rng.integers(8, 100))
        table = table_of([], count)
        for part in np.array_split(rng.permutation(count), int(rng.integers(1, 12))):
            branch(table, part, 0, rng)
        batch = rng.permutation(count)
        lens = rng.integers(150 * PAGE, 200 * PAGE, count)
        groups = find_groups(table, batch, lens, PAGE)
        assert len(groups) <= MAX_GROUPS
        members = [place for group in groups for place in group.members.tolist()]
        assert len(set(members)) == len(members)
        for group in groups:
            seen += 1
            assert len(group.members) >= 4
            assert group.length >= 256
            assert group.length % PAGE == 0
            assert group.length < lens[group.members].min()
            first = table[batch[group.members], : group.length // PAGE]
            assert (first == first[0]).all()
    assert seen > 300


class Noted:
    """Replaces an attention back end."""

    def __init__(self) -> None:
        self.told: list[list[tuple[list[int], int]]] = []

    def put_prefixes(self, groups: list[PrefixGroup]) -> None:
        self.told.append(found(groups))


def test_groups_are_found_again_when_rows_change() -> None:
    rows = BatchRows(20, 200, 4000, 100)
    rows.page_table_host[:] = table_of([(list(range(12)), 150)], 21)
    attention = Noted()
    prefixes = PrefixGroups(rows, PAGE, 8, attention)
    batch, lens = np.arange(12), np.full(12, 160 * PAGE)

    def look(batch: np.ndarray) -> bool:
        if not prefixes.find(batch, lens[: len(batch)]):
            return False
        prefixes.send()
        return True

    assert not look(np.arange(7)), "a small batch"
    assert not attention.told
    for _ in range(3):
        assert look(batch)
    assert attention.told == [[(list(range(12)), 150 * PAGE)]]
    assert look(batch[1:])
    assert attention.told[1:] == [[(list(range(11)), 150 * PAGE)]]
    # Another request got row 3: the same rows, but other pages.
    rows.apply([], [PageUpdate(3, 0, np.arange(9000, 9200, dtype=np.int32))])
    assert look(batch[1:])
    assert attention.told[2:] == [[([0, 1, *range(3, 11)], 150 * PAGE)]]
    # Too little to save.
    assert not look(np.array([0, 1, 2, 4, *range(12, 20)]))
    assert look(batch[1:])
    prefixes.clear()
    assert look(batch[1:])
    assert attention.told[-2:] == [[], attention.told[2]]
