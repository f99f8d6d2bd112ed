"""The probe of a new grammar finds grammars that would fail or be slow during generation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from runtime.grammar.grammar_backend import BitmaskRows, GrammarError
from runtime.grammar.probe import probe
from runtime.requests.sampling_params import GrammarSpec

VOCAB_SIZE = 96
EOS = 5
BLANK = 6
FREE = list(range(40, 96))


@dataclass
class Toy:
    """A grammar that is a list: what may come at each place, the last one for ever.

    Attributes:
        refused: a token that is offered and not taken.
        slow: tokens that take 10 ms, just above the limit.
        num_slow_walks: for how many more walks they do; empty for all.
    """

    allowed: list[list[int]]
    refused: int = -1
    slow: frozenset[int] = frozenset()
    num_slow_walks: list[int] = field(default_factory=list)
    place: int = 0
    is_terminated: bool = False

    def compile(self, spec: GrammarSpec) -> bytes:
        return b""

    def load(self, payload: bytes) -> Toy:
        return self

    def start(self, compiled: Toy) -> Toy:
        is_slow = True
        if self.num_slow_walks:
            self.num_slow_walks[0] -= 1
            is_slow = self.num_slow_walks[0] >= 0
        return Toy(self.allowed, self.refused, self.slow if is_slow else frozenset())

    def fill(self, matchers: Sequence[Toy], words: BitmaskRows) -> None:
        (matcher,) = matchers
        bits = np.zeros(words.shape[1] * 32, dtype=bool)
        bits[self.allowed[min(matcher.place, len(self.allowed) - 1)]] = True
        words[0] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        if token_id in self.slow:
            began = time.process_time()
            while time.process_time() - began < 0.01:
                pass
        self.place += token_id != BLANK
        self.is_terminated = token_id == EOS
        return token_id != self.refused


def test_what_can_be_followed_passes() -> None:
    probe(Toy([FREE]), b"", VOCAB_SIZE, [EOS])
    probe(Toy([[7], [EOS]]), b"", VOCAB_SIZE, [EOS])
    probe(Toy([[7], []]), b"", VOCAB_SIZE, [EOS])


def test_nothing_is_allowed() -> None:
    with pytest.raises(GrammarError, match="no output at all"):
        probe(Toy([[]]), b"", VOCAB_SIZE, [EOS])


def test_a_token_that_is_offered_and_not_taken() -> None:
    # The text may end at once, too.
    with pytest.raises(GrammarError, match="does not accept"):
        probe(Toy([[EOS, 7]], refused=7), b"", VOCAB_SIZE, [EOS])


def test_what_lies_behind_places_where_blanks_may_come() -> None:
    # Blanks move nothing: the first walk stays with them, the second gets to the text.
    structure = [[BLANK, token_id] for token_id in range(10, 20)]
    probe(Toy([*structure, FREE]), b"", VOCAB_SIZE, [EOS])
    with pytest.raises(GrammarError, match="too ambiguous"):
        probe(Toy([*structure, FREE], slow=frozenset(FREE)), b"", VOCAB_SIZE, [EOS])


@pytest.mark.parametrize("num_slow_walks", [1, 2])
def test_a_walk_that_a_neighbour_slowed_is_repeated(num_slow_walks: int) -> None:
    toy = Toy([FREE], slow=frozenset(FREE), num_slow_walks=[num_slow_walks])
    probe(toy, b"", VOCAB_SIZE, [EOS])


def test_a_walk_is_not_repeated_for_ever() -> None:
    toy = Toy([FREE], slow=frozenset(FREE), num_slow_walks=[3])
    with pytest.raises(GrammarError, match="too ambiguous"):
        probe(toy, b"", VOCAB_SIZE, [EOS])
