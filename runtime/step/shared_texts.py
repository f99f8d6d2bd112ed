"""Finds texts of a step that begin with the same tokens, so that these are computed once.

An example is a query that stands before each of several documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.step.step_plan import Int32Array, Int64Array


class SharedTexts:
    """Finds how many tokens each text shares with an earlier text of the step.

    A text is compared only with the latest text that shares nothing with an earlier one. This
    suffices, because the texts of one request are adjacent.
    """

    def __init__(self, grain: int) -> None:
        """Start without texts.

        Shared lengths are rounded down to multiples of `grain` tokens. Each text has at least one
        token that is not shared.
        """
        self._grain = grain
        self._lender: Int32Array | None = None

    def num_shared(self, text: Int32Array) -> int:
        """Return how many tokens at the beginning of `text` an earlier text computes."""
        if self._lender is None:
            return 0
        most = min(len(self._lender), len(text) - 1)
        different = self._lender[:most] != text[:most]
        same = int(different.argmax()) if different.any() else most
        return same - same % self._grain

    def add(self, text: Int32Array) -> int:
        """Add a text and return `num_shared` for it.

        If this is 0, later texts may share the beginning of `text`.
        """
        num_shared = self.num_shared(text)
        if not num_shared:
            self._lender = text
        return num_shared


def shared_beginnings(texts: Sequence[Int32Array], grain: int) -> tuple[Int64Array, Int64Array]:
    """Find the beginnings that texts of a step share; see `SharedTexts`.

    Args:
        texts: the token ids of each text.
        grain: shared lengths are rounded down to multiples of this.

    Returns:
        Two arrays, `[num_texts]` int64. The first has, for each text, the index of the text that
        computes its beginning, or its own index if it shares none. The second has the lengths of
        the shared beginnings. A text that computes a beginning for others shares none itself.
    """
    known = SharedTexts(grain)
    lengths = np.array([known.add(text) for text in texts], dtype=np.int64)
    indices = np.arange(len(texts), dtype=np.int64)
    lenders = np.maximum.accumulate(np.where(lengths == 0, indices, 0))
    return lenders, lengths
