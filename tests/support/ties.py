"""Compares greedy tokens of two ways of computing in 16 bits: equal, except where tokens tie."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.engine import InProcessEngine

# The difference of log-probabilities between two ways of computing, in a model of `SIZES`.
ROUNDING = {"bfloat16": 0.15, "float16": 0.04}
# The lead of a token at which two ways may diverge.
TIE = {"bfloat16": 0.1, "float16": 0.04}


def assert_same_but_for_ties(
    reference: InProcessEngine,
    other: InProcessEngine,
    requests: Iterable[int],
    dtype: str,
    *,
    rounding: float | None = None,
    tie: float | None = None,
) -> int:
    """Compare tokens, and log-probabilities up to where two requests diverge.

    Args:
        reference: has run the requests with `LogprobSpec(-1, 2)`, greedily.
        other: has run the same requests in the same way.
        requests: their numbers.
        dtype: the type in which both compute.
        rounding: how much log-probabilities may differ, instead of `ROUNDING`.
        tie: the lead of a token at which two ways may diverge, instead of `TIE`.

    Returns:
        How many requests have the same tokens to the end.
    """
    rounding = ROUNDING[dtype] if rounding is None else rounding
    tie = TIE[dtype] if tie is None else tie
    equal = 0
    for i in requests:
        ours, theirs = reference.tokens[i], other.tokens[i]
        first = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        equal += first is None
        for n in range(len(ours) if first is None else first):
            (best, _), (also, _) = (engine.outputs[i][n].top[0] for engine in (reference, other))
            assert abs(best - also) < rounding, f"request {i}, token {n}: {best} {also}"
        if first is not None:
            (best, _), (second, _) = reference.outputs[i][first].top
            assert best - second < tie, f"request {i} diverges at token {first}: {best} {second}"
    return equal
