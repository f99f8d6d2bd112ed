"""Rotary tables: the cosines and sines of every position, including extensions of the context.

The arithmetic repeats the steps of `transformers.modeling_rope_utils` in float32, so that tables
agree to the last bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runtime.checkpoint.attention_spec import PositionScale
from runtime.checkpoint.rope_json import RopeConfig
from runtime.errors import StartupError


class RopeTables:
    """The rotary tables of one model; layers with the same rotary embedding share a table."""

    def __init__(self, max_positions: int, device: torch.device) -> None:
        """Prepare for tables of `max_positions` rows on `device`, which are made on request."""
        self._max_positions = max_positions
        self._device = device
        self._tables: list[tuple[RopeConfig, int, Tensor]] = []
        self._query_scales: dict[PositionScale, Tensor] = {}

    def table(self, rope: RopeConfig, head_dim: int) -> Tensor:
        """Return the table of `cos_sin_table` for these settings; it is computed once."""
        for known, size, table in self._tables:
            if known == rope and size == head_dim:
                return table
        table = cos_sin_table(rope, head_dim, self._max_positions, self._device)
        self._tables.append((rope, head_dim, table))
        return table

    def query_scales(self, scale: PositionScale) -> Tensor:
        """Return the factor of queries at each position, `[max_positions]` float32."""
        if scale not in self._query_scales:
            positions = torch.arange(self._max_positions)
            growth = torch.log(1 + torch.floor(positions / scale.context))
            self._query_scales[scale] = (1 + scale.beta * growth).to(self._device)
        return self._query_scales[scale]


def cos_sin_table(
    rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device
) -> Tensor:
    """Compute the table of cosines and sines that `kernels.rope` reads.

    Args:
        rope: the kind of scaling and its numbers, as `read_rope` checked them.
        head_dim: number of rotated elements of a head, even.
        max_positions: rows of the table.
        device: device of the result; the table is computed on the CPU.

    Returns:
        `[max_positions, head_dim]` float32: in each row `head_dim / 2` cosines, then as many sines.
        All are multiplied by the scaling's attention factor, if it has one.
    """
    inv_freq, attention_factor = _inverse_frequencies(rope, head_dim, max_positions)
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * inv_freq
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return table.mul_(attention_factor).to(device)


def _inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """Return the angle per position, `[head_dim / 2]` float32, and the factor of the table."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if rope.scaling == "yarn":
        return _yarn(rope, head_dim, rope.theta**exponents)
    if rope.scaling == "longrope":
        return _longrope(rope, rope.theta**exponents, max_positions)
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        return inv_freq / float(rope.parameters["factor"]), 1.0
    if rope.scaling == "factors":
        factors = torch.tensor(rope.parameters["factors"], dtype=inv_freq.dtype)
        if factors.shape != inv_freq.shape:
            raise StartupError(
                f"the rotary embedding has {len(factors)} factors for {len(inv_freq)} angles"
            )
        return inv_freq / factors, 1.0
    if rope.scaling == "llama3":
        return _llama3(rope, inv_freq), 1.0
    # The scaling "dynamic" changes nothing within the original context, at which `context_len`
    # ends.
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Return `inv_freq` with low frequencies divided by `factor`, and high ones unchanged.

    Frequencies between the two are interpolated.

    Source: Llama 3.1.
    """
    numbers = rope.parameters
    factor = float(numbers["factor"])
    low, high = float(numbers["low_freq_factor"]), float(numbers["high_freq_factor"])
    context = int(numbers["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / factor, inv_freq)
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * scaled / factor + blend * scaled
    is_between = ~(wavelength < context / high) & ~(wavelength > context / low)
    return torch.where(is_between, blended, scaled)


def _yarn(rope: RopeConfig, head_dim: int, frequencies: Tensor) -> tuple[Tensor, float]:
    """Return the angle per position of each frequency, and the factor of the table.

    Low frequencies are divided by `factor`, high ones are unchanged, and those between are
    interpolated.

    Source: YaRN, arXiv 2309.00071.
    """
    numbers = rope.parameters
    factor = float(numbers["factor"])
    context = int(numbers["original_max_position_embeddings"])

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension_of(float(numbers.get("beta_fast") or 32))
    high = dimension_of(float(numbers.get("beta_slow") or 1))
    if numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    inv_freq = 1.0 / (factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep
    return inv_freq, _yarn_attention_factor(numbers, factor)


def _longrope(rope: RopeConfig, frequencies: Tensor, max_positions: int) -> tuple[Tensor, float]:
    """Return the angle per position of each frequency, and the factor of the table.

    Each frequency is divided by a factor of its own: for all sequences the long or the short one.

    The long factors are used if the longest sequence that is served exceeds the original context.
    `transformers` chooses by the length of each sequence instead. Then, when a sequence grows
    beyond the original context, all its keys would change, but the cached keys would not.

    Source: LongRoPE, arXiv 2402.13753.
    """
    numbers = rope.parameters
    # A worker's tables have one row more than its longest sequence.
    is_long = max_positions - 1 > int(numbers["original_max_position_embeddings"])
    factors = torch.tensor(numbers["long_factor" if is_long else "short_factor"])
    return 1.0 / (factors * frequencies), float(numbers["attention_factor"])


def _yarn_attention_factor(numbers: dict[str, float], factor: float) -> float:
    given = numbers.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all_dim = numbers.get("mscale"), numbers.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)
