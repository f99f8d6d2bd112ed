"""A library that is rarely needed is loaded when it is needed, and counts as before."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.grammar.cache import with_size
from runtime.grammar.grammar_backend import GrammarError
from runtime.grammar.libraries import GrammarLibraries, NotLoaded
from runtime.requests.sampling_params import GrammarSpec

SPEC = GrammarSpec("regex", "a+")


class Library:
    def __init__(self, name: str, *, refuses: bool) -> None:
        self.name, self.refuses = name, refuses

    def compile(self, spec: GrammarSpec) -> bytes:
        if self.refuses:
            raise GrammarError(f"{self.name} cannot")
        return with_size(self.name.encode() + spec.text.encode(), 10)

    def load(self, payload: bytes) -> Any:
        return self.name


class Later:
    """Makes a library, or cannot, and counts how often it was asked to."""

    def __init__(self, library: Any) -> None:
        self.library, self.num_made = library, 0

    def __call__(self) -> Any:
        self.num_made += 1
        if self.library is None:
            raise ValueError("no such tokenizer")
        return self.library


def libraries(first_refuses: bool, later: Later) -> GrammarLibraries:
    first: Any = Library("first", refuses=first_refuses)
    return GrammarLibraries({"first": first}, {"second": later})


def test_the_first_is_enough() -> None:
    later = Later(Library("second", refuses=False))
    both = libraries(False, later)
    assert both.load(both.compile(SPEC, may_load=False)).library == "first"
    assert later.num_made == 0
    assert both.names == ("first", "second")


def test_a_fork_says_that_another_is_needed_and_its_parent_loads_it() -> None:
    later = Later(Library("second", refuses=False))
    both = libraries(True, later)
    with pytest.raises(NotLoaded):
        both.compile(SPEC, may_load=False)
    assert later.num_made == 0
    both.load_all()
    payload = both.compile(SPEC, may_load=False)
    assert both.load(payload).library == "second"
    assert later.num_made == 1
    # A worker loads it with the first grammar that was compiled by it.
    worker = Later(Library("second", refuses=False))
    assert libraries(True, worker).load(payload).library == "second"
    assert worker.num_made == 1


def test_one_that_cannot_work_is_left_out_once() -> None:
    later = Later(None)
    both = libraries(True, later)
    for _ in range(2):
        with pytest.raises(GrammarError, match="first cannot"):
            both.compile(SPEC)
    assert later.num_made == 1
    assert both.names == ("first",)
