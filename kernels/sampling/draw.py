"""Counter-based uniforms and the inverse-CDF draw.

A uniform depends only on `(seed, position)`, not on the batch, the device or earlier draws. Integer
arithmetic in int64 wraps the same way everywhere.
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
    # The seed is hashed first: seeds that differ by one must not produce shifted copies of one
    # another's stream.
    mixed = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN)
    return _shift_right(mixed, 40).float() * 2.0**-24


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return `[batch]` int64: the first column whose running sum passes `uniform * total`.

    A column of weight 0 is never drawn, and columns of weight 0 in between do not change the
    draw: the running sum adds in column order (in float64 on CPU) whatever the batch.

    Args:
        weights: `[batch, n]` float32, not negative, not all zero.
        uniforms: `[batch]` float32 in `[0, 1)`.
    """
    running = weights.cumsum(-1)
    total = running[:, -1:]
    # The product may round up to the total itself, which no column would exceed.
    target = torch.minimum(uniforms.unsqueeze(1) * total, torch.nextafter(total, total * 0.0))
    return torch.searchsorted(running, target, right=True).squeeze(1)
