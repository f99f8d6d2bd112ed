"""Tries a compiled grammar for some steps, to find one that is slow or that allows no output."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.grammar.grammar_backend import GrammarBackend, GrammarError, num_words

# Number of steps that repeat the last token if possible, for example in runs of blanks or in
# strings without an end.
_NUM_REPEATING = 192
# Number of steps that choose a random token where few are allowed. They pass through the structure
# and reach strings, in which other tokens are allowed.
_NUM_HURRYING = 64
# A position is free text if at least this share of the vocabulary is allowed.
_FREE_SHARE = 0.125
# Most CPU time of a step. An ordinary schema takes up to 3 ms, and up to twice as long while
# another process uses the same core.
_STEP_LIMIT_S = 0.008
_NUM_SLOW_STEPS = 8
# Other processes may slow down a walk still more, but rarely three walks in a row. So a slow walk
# is repeated, unless its steps are too slow for this explanation.
_NUM_WALKS = 3
_SURELY_SLOW_S = 4 * _STEP_LIMIT_S
_TOO_SLOW = "it is too ambiguous to be followed at the speed of the model"


def probe(
    backend: GrammarBackend[Any], payload: bytes, vocab_size: int, eos_token_ids: list[int]
) -> None:
    """Follow a compiled grammar along allowed tokens, in two different ways.

    Args:
        backend: the library that compiled the grammar.
        payload: the compiled grammar.
        vocab_size: width of the logits.
        eos_token_ids: token ids that end an output. They are avoided if another token is allowed.

    Raises:
        GrammarError: the grammar allows no output or exceeds a limit of the library, the library
            offers a token that it does not accept, or steps take so long that they would delay
            other requests.
    """
    compiled = backend.load(payload)
    eos = np.array(eos_token_ids, dtype=np.int64)
    for num_steps, free_size in (
        (_NUM_REPEATING, 1),
        (_NUM_HURRYING, int(_FREE_SHARE * vocab_size)),
    ):
        for _ in range(_NUM_WALKS):
            choice = _Choice(vocab_size, eos, free_size)
            slow_s = _walk(backend, backend.start(compiled), num_steps, choice)
            if slow_s is None:
                break
            if slow_s > _SURELY_SLOW_S:
                raise GrammarError(_TOO_SLOW)
        else:
            raise GrammarError(_TOO_SLOW)


def _walk(
    backend: GrammarBackend[Any], matcher: Any, num_steps: int, choice: _Choice
) -> float | None:
    """Return the CPU time of the fastest of `_NUM_SLOW_STEPS` slow steps, in seconds.

    The walk follows tokens that the grammar allows. `None` if it has fewer slow steps.
    """
    words = np.zeros((1, num_words(choice.vocab_size)), dtype=np.int32)
    slow_steps_s: list[float] = []
    for step in range(num_steps):
        # CPU time is measured, so that other processes cause no refusal.
        started = time.process_time()
        backend.fill([matcher], words)
        token_id = choice.next(words[0])
        if token_id is None:
            if step == 0:
                raise GrammarError("it allows no output at all")
            return None
        if not matcher.accept(token_id):
            raise GrammarError("its library allows a token that it does not accept")
        if matcher.is_terminated:
            return None
        took_s = time.process_time() - started
        if took_s > _STEP_LIMIT_S:
            slow_steps_s.append(took_s)
        if len(slow_steps_s) >= _NUM_SLOW_STEPS:
            return min(slow_steps_s)
    return None


class _Choice:
    """Chooses a token from each mask: the previous token if it is allowed, else a random one."""

    def __init__(self, vocab_size: int, eos: NDArray[np.int64], free_size: int) -> None:
        """Choose the previous token only if at least `free_size` tokens are allowed."""
        self.vocab_size = vocab_size
        self._eos = eos
        self._free_size = free_size
        self._rng = np.random.default_rng(0)
        self._last = -1

    def next(self, mask: NDArray[np.int32]) -> int | None:
        """Return a token that `mask`, `[num_words]` int32, allows; `None` if it allows none."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size]
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            return None
        if self._last < 0 or not bits[self._last] or len(allowed) < self._free_size:
            goes_on = allowed[~np.isin(allowed, self._eos)]
            self._last = int(self._rng.choice(goes_on if len(goes_on) else allowed))
        return self._last
