"""Garbage collection does not touch running requests and frees finished ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from server.garbage import settle

NUM_OBJECTS = 200_000


@pytest.fixture
def generations() -> Iterator[list[int]]:
    """Which generation each collection has looked at, since the front has settled."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    before = gc.get_threshold()
    settle()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.set_threshold(*before)
    gc.unfreeze()


class Node:
    me: Node


def test_what_runs_is_not_looked_at_as_a_whole(generations: list[int]) -> None:
    running = [[number] for number in range(NUM_OBJECTS)]
    assert len(running) == NUM_OBJECTS
    assert 1 in generations
    assert 2 not in generations


def test_what_holds_itself_is_found(generations: list[int]) -> None:
    left = Node()
    left.me = left
    is_there = weakref.ref(left)
    del left
    running = [[number] for number in range(NUM_OBJECTS)]
    assert len(running) == NUM_OBJECTS
    assert generations
    assert is_there() is None
