"""Eviction from the radix tree: which pages, in which order, and at what cost."""

import random
import sys

import numpy as np
import pytest

from runtime.cache.radix_tree import RadixTree

PAGE = 4


def tokens_of(*pages: int) -> np.ndarray:
    return np.repeat(np.array(pages, dtype=np.int32), PAGE)


def numbered(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def test_looking_changes_nothing() -> None:
    """Not which is oldest, not where a node is cut, not which name spaces there are."""
    tree = RadixTree(PAGE)
    tree.insert(tokens_of(1, 2, 3), numbered(10, 11, 12), "")
    tree.insert(tokens_of(7), numbered(13), "")
    assert tree.count_pages(tokens_of(1, 2, 9), "") == 2
    assert tree.count_pages(tokens_of(1, 2, 3, 4), "") == 3
    assert tree.count_pages(tokens_of(8), "") == tree.count_pages(tokens_of(7), "other") == 0
    assert tree.evict(3).tolist() == [10, 11, 12]


def test_the_beginning_of_a_long_leaf_stays() -> None:
    tree = RadixTree(PAGE)
    tree.insert(tokens_of(1, 2, 3, 4), numbered(10, 11, 12, 13), "")
    assert tree.evict(1).tolist() == [13]
    assert tree.evict(2).tolist() == [11, 12]
    assert tree.match(tokens_of(1, 2, 3, 4), "").pages.tolist() == [10]
    tree.insert(tokens_of(1, 5), numbered(10, 20), "")
    assert tree.evict(9).tolist() == [20, 10]
    assert tree.num_pages == 0
    assert tree.evict(1).size == 0


class EachPage:
    """What a tree does, page by page: of those without others behind them the oldest goes first."""

    def __init__(self) -> None:
        self.used: dict[tuple[int, ...], int] = {}
        self.locks: list[tuple[int, ...]] = []
        self._clock = 0

    def use(self, path: tuple[int, ...], is_new: bool) -> tuple[int, ...]:
        self._clock += 1
        for end in range(1, len(path) + 1):
            if not is_new and path[:end] not in self.used:
                return path[: end - 1]
            self.used[path[:end]] = self._clock
        return path

    def evict(self, count: int) -> set[tuple[int, ...]]:
        gone = set()
        for _ in range(count):
            kept = {lock[:end] for lock in self.locks for end in range(1, len(lock) + 1)}
            kept |= {path[:-1] for path in self.used}
            free = [path for path in self.used if path not in kept]
            if free:
                gone.add(min(free, key=self.used.__getitem__))
                del self.used[min(free, key=self.used.__getitem__)]
        return gone


@pytest.mark.parametrize("seed", range(30))
def test_random_use_is_evicted_in_the_order_of_use(seed: int) -> None:
    draw = random.Random(seed)
    tree, model = RadixTree(PAGE), EachPage()
    # Each path has a page of its own.
    number_of: dict[tuple[int, ...], int] = {}
    nodes = []
    for _ in range(300):
        path = tuple(draw.randrange(3) for _ in range(draw.randint(1, 5)))
        pages = [
            number_of.setdefault(path[:end], len(number_of)) for end in range(1, 1 + len(path))
        ]
        match draw.randrange(4):
            case 0:
                tree.insert(tokens_of(*path), numbered(*pages), "")
                model.use(path, is_new=True)
            case 1:
                found = tree.match(tokens_of(*path), "")
                used = model.use(path, is_new=False)
                assert found.pages.tolist() == pages[: len(used)]
                tree.lock(found.node)
                nodes.append(found.node)
                model.locks.append(used)
            case 2 if nodes:
                index = draw.randrange(len(nodes))
                tree.unlock(nodes.pop(index))
                model.locks.pop(index)
            case 3:
                count = draw.randint(1, 4)
                gone = {number_of[each] for each in model.evict(count)}
                assert {*tree.evict(count).tolist()} == gone
        assert tree.num_pages == len(model.used)


def test_a_page_of_a_large_tree_is_found_in_few_steps() -> None:
    tree = RadixTree(PAGE)
    for i in range(5000):
        tree.insert(tokens_of(i % 50, i), numbered(2 * i + 1, 2 * i + 2), "")
    assert tree.evict(1).size == 1
    calls = 0

    def note(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(note)
    try:
        tree.evict(1)
    finally:
        sys.setprofile(None)
    assert calls < 100
