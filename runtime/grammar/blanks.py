"""Limits the number of blanks between two tokens of JSON.

Blanks are spaces, tabs and line breaks. JSON allows any number of them, so a model might write
blanks until its token limit. The limit is applied to the mask of allowed tokens. As a part of the
grammar, it would make every mask three times as expensive, even in outputs without blanks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.grammar.grammar_backend import num_words

MAX_BLANKS = 32
_BLANKS = b" \t\r\n"
# A JSON string cannot contain these characters. So if the grammar allows one of them, the output is
# not inside a string.
_BETWEEN = b"\t\r\n"

MaskRow = NDArray[np.int32]


class BlankTokens:
    """The number of blanks at the beginning and at the end of each token of a vocabulary.

    A single token with more blanks than the limit is allowed if no blank precedes it.

    Attributes:
        free_run: if an output ends with at most this many blanks, no token can exceed the limit.
    """

    def __init__(self, vocab: Sequence[bytes]) -> None:
        """Count the blanks in each token; `vocab` has the bytes of each token."""
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
        """Return the number of blanks at the end of an output after one more token.

        Args:
            run: number of blanks at the end of the output before the token.
            token_id: the token.
        """
        blanks = self._ends_with[token_id]
        return run + blanks if blanks and token_id in self._all_blank else blanks

    def bound(self, mask: MaskRow, run: int) -> None:
        """Remove those tokens from a mask that would lead to more than `MAX_BLANKS` blanks.

        Inside a JSON string nothing is removed.

        Args:
            mask: `[num_words]` int32, a bit for each allowed token. Changed in place, except if no
                token would remain.
            run: number of blanks at the end of the output.
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
