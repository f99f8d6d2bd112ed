"""Texts of a step that begin alike, as documents behind a query do: who computes for whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.step.step_plan import Int32Array, Int64Array


class SharedTexts:
    """Texts one after the other; each is held against the last that computes all of its own.

    Those of one request stand side by side.
    """

    def __init__(self, grain: int) -> None:
        """Share `grain` tokens at a time; a text keeps one of its own at least."""
        self._grain = grain
        self._lender: Int32Array | None = None

    def num_shared(self, text: Int32Array) -> int:
        """Tokens at the beginning of `text` that are computed already."""
        if self._lender is None:
            return 0
        most = min(len(self._lender), len(text) - 1)
        different = self._lender[:most] != text[:most]
        same = int(different.argmax()) if different.any() else most
        return same - same % self._grain

    def add(self, text: Int32Array) -> int:
        """Return what `num_shared` does; where that is nothing, `text` may lend to the next."""
        num_shared = self.num_shared(text)
        if not num_shared:
            self._lender = text
        return num_shared


def shared_beginnings(texts: Sequence[Int32Array], grain: int) -> tuple[Int64Array, Int64Array]:
    """Find what each text of a step need not compute itself; see `SharedTexts`.

    Returns:
        Of each text the index of the one that computes its beginning (its own where nobody does),
        and how many tokens that are, a multiple of `grain`. A text that computes for others
        computes all of its own.
    """
    known = SharedTexts(grain)
    lengths = np.array([known.add(text) for text in texts], dtype=np.int64)
    places = np.arange(len(texts), dtype=np.int64)
    lenders = np.maximum.accumulate(np.where(lengths == 0, places, 0))
    return lenders, lengths
