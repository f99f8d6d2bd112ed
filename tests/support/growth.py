"""How time grows with the size of an input."""

from __future__ import annotations

import time
from collections.abc import Callable


def assert_linear(
    work: Callable[[int], object], short: int, long: int, *, least_s: float = 0.002
) -> None:
    """`work(long)` takes longer than `work(short)` as `long` is larger; at worst three times that.

    The thread's own time, and against itself: neither a busy nor a slow machine makes an algorithm
    quadratic. Nor does what the tests before it left to collect: one of three tries must do.

    Args:
        work: does it with an input of the given size.
        short: a size.
        long: a larger one.
        least_s: what the short one counts at least, as clocks are coarse.
    """

    def seconds(size: int) -> float:
        started = time.thread_time()
        work(size)
        return time.thread_time() - started

    bound_s = 3 * long / short * max(least_s, min(seconds(short) for _ in range(3)))
    took_s: list[float] = []
    while not took_s or took_s[-1] >= bound_s:
        assert len(took_s) < 3, f"{took_s} s for {long}, where {bound_s} were bearable"
        took_s.append(seconds(long))
