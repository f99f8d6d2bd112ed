"""Compares the greedy tokens of two engines in 16 bits: equal, except where two tokens tie."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.engine import InProcessEngine

# Most difference of log-probabilities between two engines, for a model of `SIZES`.
ROUNDING = {"bfloat16": 0.15, "float16": 0.04}
# If a token leads by less than this, the two engines may choose different tokens.
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
    """Compare tokens and log-probabilities of two engines, for each request until tokens differ.

    Args:
        reference: an engine that has run the requests greedily with `LogprobSpec(-1, 2)`.
        other: another engine that has run the same requests.
        requests: ids of the requests.
        dtype: data type of both engines.
        rounding: most difference of log-probabilities; `None` for that in `ROUNDING`.
        tie: largest lead at which tokens may differ; `None` for that in `TIE`.

    Returns:
        Number of requests whose tokens are all equal.
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
