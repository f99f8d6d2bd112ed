"""Floats to stored forms: what a folder of 16-bit weights becomes when it is asked for smaller."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.quantized_linear import StoredMatrix, find_form

__all__ = ["ENCODED_FORMS", "encode"]

_Q4_K_STEPS = 21
# Values that are encoded at a time: the search for q4_k has a dozen tensors of them.
_AT_ONCE = 1 << 22


def _half_bytes(values: Tensor) -> Tensor:
    return values.to(torch.float16).view(torch.uint8)


def _nearest(values: Tensor) -> Tensor:
    """Round to nearest, halves away from zero: as GGML does."""
    return values.sign() * (values.abs() + 0.5).floor()


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, 0 where the denominator is 0."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)


def _q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(1, keepdim=True) / torch.full((1, 1), 127.0)
    quants = _nearest(blocks * _over(torch.ones(1, 1), scale)).to(torch.int8)
    return torch.cat([_half_bytes(scale), quants.view(torch.uint8)], dim=1)


def _scales_and_minima(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Fit `scale * q + minimum`, q from 0 to `most`, to each group; the minimum is at most 0.

    The least weighted square error of 21 spreads around the plain one, as llama.cpp searches.

    Returns:
        Scale and negated minimum, `[num_groups, 1]` each.
    """
    weight = groups.abs() + groups.square().mean(1, keepdim=True).sqrt()
    low = groups.amin(1, keepdim=True).clamp(max=0)
    spread = groups.amax(1, keepdim=True) - low
    total = weight.sum(1, keepdim=True)
    total_x = (weight * groups).sum(1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    best_scale, best_minimum = torch.zeros_like(low), low
    for step in range(_Q4_K_STEPS + 1):
        # The first is the plain spread.
        wanted = most if step == 0 else most - 1 + 0.1 * (step - 1)
        quants = (_over(torch.full_like(spread, wanted), spread) * (groups - low)).round()
        quants = quants.clamp(0, most)
        total_q = (weight * quants).sum(1, keepdim=True)
        total_qq = (weight * quants * quants).sum(1, keepdim=True)
        total_xq = (weight * groups * quants).sum(1, keepdim=True)
        determinant = total * total_qq - total_q * total_q
        scale = _over(total * total_xq - total_x * total_q, determinant)
        minimum = _over(total_qq * total_x - total_q * total_xq, determinant)
        above = minimum > 0
        scale = torch.where(above, _over(total_xq, total_qq), scale)
        minimum = minimum.clamp(max=0)
        error = (weight * (scale * quants + minimum - groups).square()).sum(1, keepdim=True)
        better = (error < best) & (determinant > 0)
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
        best_minimum = torch.where(better, minimum, best_minimum)
    return best_scale.clamp(min=0), -best_minimum


def _q4_k(blocks: Tensor) -> Tensor:
    groups = blocks.reshape(-1, 32)
    scales, minima = (values.view(-1, 8) for values in _scales_and_minima(groups, 15))
    wholes, sixes = [], []
    for values in (scales, minima):
        whole = (values.amax(1, keepdim=True) / 63).to(torch.float16)
        sixes.append(_over(values, whole.float()).round().clamp(0, 63).to(torch.uint8))
        wholes.append(whole)
    (scale, minimum), (s, m) = wholes, sixes
    step = (scale.float() * s.float()).view(-1, 1)
    least = (minimum.float() * m.float()).view(-1, 1)
    quants = _over(groups + least, step).round().clamp(0, 15).to(torch.uint8)
    low, high = quants.view(-1, 4, 2, 32).unbind(2)
    packed = torch.cat(
        [
            s[:, :4] | (s[:, 4:] >> 4) << 6,
            m[:, :4] | (m[:, 4:] >> 4) << 6,
            (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4,
        ],
        dim=1,
    )
    halves = [_half_bytes(scale), _half_bytes(minimum)]
    return torch.cat([*halves, packed, (low | high << 4).flatten(1)], dim=1)


_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {"q8_0": _q8_0, "q4_k": _q4_k}
ENCODED_FORMS = tuple(_ENCODERS)


def encode(weight: Tensor, form: str) -> StoredMatrix:
    """Round a matrix to a stored form.

    Args:
        weight: `[out_features, in_features]`, any floating dtype, finite.
        form: one of `ENCODED_FORMS`. "q8_0" has the bits that GGML's own has.

    Raises:
        ValueError: another form, or `in_features` is not a whole number of its blocks.
    """
    if form not in _ENCODERS:
        raise ValueError(f"{form!r} is not among the forms to round to: {', '.join(ENCODED_FORMS)}")
    layout = find_form(form)
    out_features, in_features = weight.shape
    data = torch.empty(out_features, layout.row_bytes(in_features), dtype=torch.uint8)
    rows = max(1, _AT_ONCE // in_features)
    for part, to in zip(weight.split(rows), data.split(rows), strict=True):
        blocks = part.float().reshape(-1, layout.block_values)
        to.copy_(_ENCODERS[form](blocks).view(to.shape))
    return StoredMatrix(form, data)
