"""Follows a fresh grammar for a while: one that is slow or allows nothing is found out here."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from runtime.grammar.grammar_backend import GrammarBackend, GrammarError, num_words

_NUM_TOKENS = 192
_STEP_LIMIT_S = 0.005
_NUM_SLOW_STEPS = 8


def probe(backend: GrammarBackend[Any], payload: bytes, vocab_size: int) -> None:
    """Walk through a compiled grammar along tokens it allows, the same one again where it can.

    Raises:
        GrammarError: it allows no output, or a step takes so long that others would feel it.
    """
    matcher = backend.start(backend.load(payload))
    words = np.zeros((1, num_words(vocab_size)), dtype=np.int32)
    rng = np.random.default_rng(0)
    last, num_slow = -1, 0
    for step in range(_NUM_TOKENS):
        # Of this process alone: what else the machine does must not refuse anybody's grammar.
        started = time.process_time()
        backend.fill([matcher], words)
        bits = np.unpackbits(words[0].view(np.uint8), bitorder="little")[:vocab_size]
        if not bits.any():
            if step == 0:
                raise GrammarError("it allows no output at all")
            return
        if last < 0 or not bits[last]:
            last = int(rng.choice(np.flatnonzero(bits)))
        if not matcher.accept(last) or matcher.is_terminated:
            return
        num_slow += time.process_time() - started > _STEP_LIMIT_S
        if num_slow >= _NUM_SLOW_STEPS:
            raise GrammarError("it is too ambiguous to be followed at the speed of the model")
