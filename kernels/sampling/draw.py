"""Uniform numbers by a counter-based generator, and the draw by inverse CDF.

A uniform number depends only on `(seed, position)`, and not on the batch, the device or earlier
draws. Integer arithmetic in int64 wraps in the same way everywhere.
"""

import torch
from torch import Tensor

# splitmix64's constants as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask clears the sign copies.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Return `[batch]` float32 in `[0, 1)` with 24 random bits, a hash of seed and position.

    Args:
        seed: `[batch]` int64.
        position: `[batch]` int64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (splitmix64).
    """
    # The seed is hashed first, so that seeds that differ by one do not give shifted copies of the
    # same stream.
    mixed = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    return _shift_right(mixed, 40).float() * 2.0**-24


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first column of each row whose running sum exceeds `uniform * total`.

    A column of weight 0 is never drawn and does not change which other column is drawn. The running
    sum adds in column order (in float64 on a CPU), whatever the batch is.

    Args:
        weights: `[batch, n]` float32, not negative, not all zero.
        uniforms: `[batch]` float32 in `[0, 1)`.

    Returns:
        `[batch]` int64.
    """
    running = weights.cumsum(-1)
    total = running[:, -1:]
    # The product may round up to the total itself, which no running sum exceeds.
    target = torch.minimum(uniforms.unsqueeze(1) * total, torch.nextafter(total, total * 0.0))
    return torch.searchsorted(running, target, right=True).squeeze(1)
