"""Rounds activations to 8-bit codes, floats (E4M3) or integers, for products of such codes.

The kernel of a norm or of a gated activation may round its own result, which saves a pass over the
result. The attribute `rounding` of the product that follows (`kernels.linear.PackedLinear`) says
how. It is `None` for products on a CPU, which round their input themselves.
"""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.table import Entry, Table

__all__ = [
    "CODES",
    "LARGEST",
    "MAX_CODE",
    "ROUNDING",
    "Activations",
    "RoundedTokens",
    "Rounding",
    "RoundingKernels",
    "act_and_mul_rounded",
    "rms_norm_rounded",
    "round_activations",
    "round_to_codes",
    "scale_of",
    "to_codes",
]

CODES = torch.float8_e4m3fn
MAX_CODE = 448.0
# The largest magnitude of a code, by dtype.
LARGEST = {CODES: MAX_CODE, torch.int8: 127.0}
# The scale of a block of zeros. Any scale would do, as the codes are zeros.
_SMALLEST_SCALE = 1e-12


@dataclass(frozen=True)
class Rounding:
    """How activations are rounded to 8-bit codes.

    Attributes:
        group: number of a token's columns that share a scale; 0 for all of them.
        scale: float32 `[]`, the scale of all tokens, if the checkpoint gives it; `None` to compute
            scales from the activations.
        codes: dtype of the codes: `CODES` (E4M3), or int8.
    """

    group: int = 0
    scale: Tensor | None = None
    codes: torch.dtype = CODES


@dataclass(frozen=True)
class RoundedTokens:
    """Activations that are already rounded to codes.

    Attributes:
        codes: `[num_tokens, columns]` E4M3 or int8, contiguous.
        scales: `[num_tokens, num_groups]` float32, a view whose transpose is contiguous.
    """

    codes: Tensor
    scales: Tensor

    def __len__(self) -> int:
        return len(self.codes)


# The input of a product. Rounded tokens are passed only to a product that has a `rounding`.
Activations = Tensor | RoundedTokens


def scale_of(largest: Tensor, codes: torch.dtype = CODES) -> Tensor:
    """Return the float32 scale of numbers whose largest magnitude is `largest`."""
    # The divisor is a tensor, because a GPU divides by a plain number by multiplying by its
    # inverse, which may round differently from a CPU.
    return (largest / torch.full_like(largest, LARGEST[codes])).clamp_min(_SMALLEST_SCALE)


def to_codes(quotients: Tensor, codes: torch.dtype) -> Tensor:
    """Round numbers that were divided by their scales to codes, ties to even."""
    if codes is torch.int8:
        quotients = quotients.round()
    return quotients.clamp(-LARGEST[codes], LARGEST[codes]).to(codes)


def round_to_codes(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Round activations to codes.

    Args:
        x: `[num_tokens, columns]`, a floating dtype.
        rounding: how they are rounded. The last group of a token may be shorter.

    Returns:
        Codes `[num_tokens, columns]`, and float32 scales `[num_tokens, num_groups]`.
    """
    group = rounding.group or x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group))
    parts = padded.view(len(x), -1, group)
    if rounding.scale is None:
        scales = scale_of(parts.abs().amax(-1), rounding.codes)
    else:
        scales = rounding.scale.expand(parts.shape[:2])
    codes = to_codes(parts / scales[..., None], rounding.codes)
    return codes.view(padded.shape)[:, : x.shape[1]], scales


def round_activations(x: Tensor, rounding: Rounding) -> Tensor:
    """Return activations after rounding by `round_to_codes`, as float32 `[num_tokens, columns]`."""
    codes, scales = round_to_codes(x, rounding)
    spread = scales.repeat_interleave(rounding.group or x.shape[1], dim=1)
    return codes.float() * spread[:, : x.shape[1]]


class RoundingKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def rms_norm_rounded(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        zero_centered: bool,
        rounding: Rounding,
    ) -> RoundedTokens:
        """Compute and round a norm; see `kernels.rounding.rms_norm_rounded`."""

    def act_and_mul_rounded(
        self, x: Tensor, activation: Activation, rounding: Rounding
    ) -> RoundedTokens:
        """Compute and round a gated activation; see `kernels.rounding.act_and_mul_rounded`."""


ROUNDING: Table[RoundingKernels] = Table(
    "rounding",
    {
        "reference": Entry("kernels.rounding.reference"),
        "triton": Entry(
            "kernels.rounding.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cpu": ("reference",), "cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> RoundingKernels:
    return ROUNDING.choose(device_type).kernels


def rms_norm_rounded(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    rounding: Rounding,
) -> RoundedTokens:
    """Compute an RMS norm, and round its result as `round_to_codes` does.

    Args:
        x: `[num_tokens, hidden_size]`; see `kernels.norm.rms_norm`.
        residual: the residual stream, to which `x` is added in place before the norm, or `None`;
            see `kernels.norm.fused_add_rms_norm`.
        weight: `[hidden_size]`, the dtype of `x`.
        eps: number that is added to the mean square.
        zero_centered: whether the norm multiplies by `1 + weight`.
        rounding: how the result is rounded.
    """
    kernels = _kernels(x.device.type)
    return kernels.rms_norm_rounded(x, residual, weight, eps, zero_centered, rounding)


def act_and_mul_rounded(x: Tensor, activation: Activation, rounding: Rounding) -> RoundedTokens:
    """Compute `activation(gate) * up`, and round the result as `round_to_codes` does.

    Args:
        x: `[num_tokens, 2 * width]`, gate first; see `kernels.activation.act_and_mul`.
        activation: activation of the gate.
        rounding: how the result is rounded.
    """
    return _kernels(x.device.type).act_and_mul_rounded(x, activation, rounding)
