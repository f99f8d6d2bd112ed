"""Checks how the running time of a function grows with the size of its input."""

from __future__ import annotations

import time
from collections.abc import Callable


def assert_linear(
    work: Callable[[int], object], short: int, long: int, *, least_s: float = 0.002
) -> None:
    """Check that the time of `work` grows at most linearly, within a factor of three.

    The CPU time of this thread is compared with itself, so a busy or slow machine does not matter.
    Garbage from earlier tests may distort a measurement, so one of three tries must succeed.

    Args:
        work: processes an input of the given size.
        short: a size.
        long: a larger size.
        least_s: least time that counts for the short input, because clocks are coarse, seconds.
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
