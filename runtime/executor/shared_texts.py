"""Texts of a step that begin alike, as documents behind a query do: who computes for whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.executor.step_plan import Int32Array, Int64Array


def shared_beginnings(texts: Sequence[Int32Array], grain: int) -> tuple[Int64Array, Int64Array]:
    """Find what each text of a step need not compute itself.

    A text is held against the last one that computes all of its own tokens: those of one request
    stand side by side.

    Args:
        texts: token ids of each.
        grain: tokens that are shared at a time; a text keeps one of its own at least.

    Returns:
        Of each text the index of the one that computes its beginning (its own where nobody does),
        and how many tokens that are, a multiple of `grain`. A text that computes for others
        computes all of its own.
    """
    lenders = np.arange(len(texts), dtype=np.int64)
    lengths = np.zeros(len(texts), dtype=np.int64)
    lender = 0
    for index in range(1, len(texts)):
        first, text = texts[lender], texts[index]
        most = min(len(first), len(text) - 1)
        different = first[:most] != text[:most]
        same = int(different.argmax()) if different.any() else most
        length = same - same % grain
        if length:
            lenders[index], lengths[index] = lender, length
        else:
            lender = index
    return lenders, lengths
