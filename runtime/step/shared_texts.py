"""Decides which text of a step computes a common beginning, such as the query before documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.step.step_plan import Int32Array, Int64Array


class SharedTexts:
    """Compares each text with the latest text that computes all its tokens.

    Texts of one request are adjacent.
    """

    def __init__(self, grain: int) -> None:
        """Share multiples of `grain` tokens; each text keeps at least one token of its own."""
        self._grain = grain
        self._lender: Int32Array | None = None

    def num_shared(self, text: Int32Array) -> int:
        """Return the number of tokens at the beginning of `text` that are computed already."""
        if self._lender is None:
            return 0
        most = min(len(self._lender), len(text) - 1)
        different = self._lender[:most] != text[:most]
        same = int(different.argmax()) if different.any() else most
        return same - same % self._grain

    def add(self, text: Int32Array) -> int:
        """Return `num_shared`; if it is 0, later texts may share the beginning of `text`."""
        num_shared = self.num_shared(text)
        if not num_shared:
            self._lender = text
        return num_shared


def shared_beginnings(texts: Sequence[Int32Array], grain: int) -> tuple[Int64Array, Int64Array]:
    """Find the part of each text of a step that another text computes; see `SharedTexts`.

    Returns:
        For each text the index of the text that computes its beginning (its own index if it shares
        none), and the length of that beginning, a multiple of `grain`. A text whose beginning
        others share computes all its own tokens.
    """
    known = SharedTexts(grain)
    lengths = np.array([known.add(text) for text in texts], dtype=np.int64)
    indices = np.arange(len(texts), dtype=np.int64)
    lenders = np.maximum.accumulate(np.where(lengths == 0, indices, 0))
    return lenders, lengths
