"""A Triton kernel that writes to an invalid address."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _write(numbers, distance):
    tl.store(numbers + distance, 1.0)


def write_far_away(numbers) -> None:
    _write[(1,)](numbers, 1 << 40)
