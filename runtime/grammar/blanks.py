"""Bounds the number of blanks between two tokens of JSON; the grammar allows any number.

A confused model would print blanks until its token limit. The bound is not part of the grammar,
where it would make every mask three times as expensive, even without blanks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.grammar.grammar_backend import num_words

MAX_BLANKS = 32
_BLANKS = b" \t\r\n"
# A JSON string cannot contain these characters, so if one is allowed, no string is open.
_BETWEEN = b"\t\r\n"

MaskRow = NDArray[np.int32]


class BlankTokens:
    """The effect of a vocabulary's tokens on a run of blanks.

    After a run of 0 blanks there is no bound: a single token may have any number of blanks.

    Attributes:
        free_run: after a run of at most this length, any token is allowed.
    """

    def __init__(self, vocab: Sequence[bytes]) -> None:
        """Look at each token's bytes."""
        begins_with = [len(token) - len(token.lstrip(_BLANKS)) for token in vocab]
        self._ends_with = [len(token) - len(token.rstrip(_BLANKS)) for token in vocab]
        self._all_blank = frozenset(
            token_id
            for token_id, token in enumerate(vocab)
            if token and begins_with[token_id] == len(token)
        )
        self.free_run = max(0, MAX_BLANKS - max(begins_with, default=0))
        self._begins_with = np.array(begins_with)
        self._between = _bits(
            np.array([each != b"" and not each.strip(_BETWEEN) for each in vocab])
        )
        self._too_long: dict[int, MaskRow] = {}

    def run_after(self, run: int, token_id: int) -> int:
        """Return how many blanks end an output when `run` blanks are followed by a token."""
        blanks = self._ends_with[token_id]
        return run + blanks if blanks and token_id in self._all_blank else blanks

    def bound(self, mask: MaskRow, run: int) -> None:
        """Remove tokens from a mask that would make a run longer than `MAX_BLANKS`.

        Args:
            mask: `[num_words]`, the allowed tokens, changed in place; it never becomes empty.
            run: number of blanks at the output's end.
        """
        if not (mask & self._between).any():
            return
        room = max(MAX_BLANKS - run, 0)
        if room not in self._too_long:
            self._too_long[room] = _bits(self._begins_with > room)
        fitting = mask & ~self._too_long[room]
        if fitting.any():
            mask[:] = fitting


def _bits(flags: NDArray[np.bool_]) -> MaskRow:
    padded = np.zeros(num_words(len(flags)) * 32, dtype=bool)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view(np.int32)
