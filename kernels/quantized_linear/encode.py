"""Encodes floats in stored forms, for weights from a trainer and for checkpoints in 16 bits.

For q8_0 the result has the same bits as that of GGML's encoder. For q4_k the encoder can search for
scales as llama.cpp does. All other scales follow from the largest number of a group. The layouts
are GGML's (`ggml-common.h`), with codes packed as in `ggml-quants.c`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.quantized_linear import StoredMatrix, find_form
from kernels.quantized_linear.decode import IQ4_VALUES

__all__ = ["ENCODED_FORMS", "encode"]

_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Magnitudes of the 4-bit float of MXFP4.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SEARCH_STEPS = 21
# Numbers that are encoded at a time: the search for q4_k has a dozen tensors of this size.
_AT_ONCE = 1 << 22


def _away_from_zero(values: Tensor) -> Tensor:
    """Round to nearest, ties away from zero, as GGML does."""
    return values.sign() * (values.abs() + 0.5).floor()


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient, or 0 if the denominator is 0."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)


def _half(numbers: Tensor) -> Tensor:
    """Convert numbers, `[n, 1]` or `[n]`, to the two bytes of a float16 each."""
    return numbers.reshape(-1, 1).to(torch.float16).view(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _codes(numbers: Tensor, low: int, high: int) -> Tensor:
    return numbers.round().clamp_(low, high).to(torch.int32)


def _bytes(codes: Tensor) -> Tensor:
    return codes.to(torch.uint8)


def _farthest(blocks: Tensor) -> Tensor:
    """Return the number with the largest magnitude along the last dimension, with its sign."""
    return blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))


def _halves(codes: Tensor) -> Tensor:
    """Pack 4-bit codes in pairs: the first half of a block goes to the low bits of the bytes."""
    first, second = codes.chunk(2, dim=-1)
    return _bytes(first | second << 4)


def _fifth(codes: Tensor) -> Tensor:
    """Return the fifth bit of each of 32 codes, packed in four bytes."""
    bits = (codes >> 4 & 1).view(-1, 4, 8) << torch.arange(8)
    return _bytes(bits.sum(dim=-1))


def _q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(1, keepdim=True) / torch.full((1, 1), 127.0)
    quants = _away_from_zero(blocks * _over(torch.ones(1, 1), scale)).to(torch.int8)
    return torch.cat([_half(scale), quants.view(torch.uint8)], dim=1)


def _symmetric(blocks: Tensor, top: int) -> tuple[Tensor, Tensor]:
    scale = _farthest(blocks) / -top
    return scale, _codes(blocks * _inverse(scale) + top, 0, 2 * top - 1)


def _affine(blocks: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    least = blocks.amin(dim=-1, keepdim=True)
    scale = (blocks.amax(dim=-1, keepdim=True) - least) / top
    return scale, least, _codes((blocks - least) * _inverse(scale), 0, top)


def _q4_0(blocks: Tensor) -> Tensor:
    scale, codes = _symmetric(blocks, 8)
    return torch.cat([_half(scale), _halves(codes)], dim=-1)


def _q4_1(blocks: Tensor) -> Tensor:
    scale, least, codes = _affine(blocks, 15)
    return torch.cat([_half(scale), _half(least), _halves(codes)], dim=-1)


def _q5_0(blocks: Tensor) -> Tensor:
    scale, codes = _symmetric(blocks, 16)
    return torch.cat([_half(scale), _fifth(codes), _halves(codes & 15)], dim=-1)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, least, codes = _affine(blocks, 31)
    return torch.cat([_half(scale), _half(least), _fifth(codes), _halves(codes & 15)], dim=-1)


def _scales_and_minima(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Fit `scale * q + minimum`, q from 0 to `most`, to each group; the minimum is at most 0.

    The search tries 21 scales around that of the group's range and takes the one with the least
    weighted square error, as llama.cpp does.

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
    for step in range(_SEARCH_STEPS + 1):
        # The first attempt is the scale of the group's range.
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


def _groups(
    blocks: Tensor, size: int, top: int, most: int, *, searches: bool = False
) -> tuple[Tensor, ...]:
    """Return codes of a block's numbers, and codes of the scales and minima of its groups.

    The codes of scales and minima are from 0 to `most`. With `searches`, scales and minima are
    those of `_scales_and_minima`; otherwise they follow from a group's range.

    Returns:
        The scale of the scales and that of the minima, `[n, 1]` each; the codes of the scales and
        those of the minima, `[n, groups]` each; the codes of the numbers, `[n, groups * size]`.
    """
    parts = blocks.unflatten(-1, (-1, size))
    if searches:
        found = _scales_and_minima(parts.flatten(0, 1), top)
        scales, minima = (each.view(parts.shape[:2]) for each in found)
    else:
        least = parts.amin(dim=-1).clamp(max=0.0)
        scales, minima = (parts.amax(dim=-1).clamp(min=0.0) - least) / top, -least
    of_scales = (scales.amax(dim=-1, keepdim=True) / most).half().float()
    of_minima = (minima.amax(dim=-1, keepdim=True) / most).half().float()
    scale_codes = _codes(scales * _inverse(of_scales), 0, most)
    minimum_codes = _codes(minima * _inverse(of_minima), 0, most)
    scale, minimum = of_scales * scale_codes, of_minima * minimum_codes
    codes = _codes((parts + minimum[..., None]) * _inverse(scale)[..., None], 0, top)
    return of_scales, of_minima, scale_codes, minimum_codes, codes.flatten(1)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack eight scales and eight minima of 6 bits in twelve bytes."""
    low_scales, high_scales = scales.chunk(2, dim=-1)
    low_minima, high_minima = minima.chunk(2, dim=-1)
    return _bytes(
        torch.cat(
            [
                low_scales | high_scales >> 4 << 6,
                low_minima | high_minima >> 4 << 6,
                high_scales & 15 | (high_minima & 15) << 4,
            ],
            dim=-1,
        )
    )


def _pairs(codes: Tensor) -> Tensor:
    """Pack 4-bit codes in pairs: of each 64 codes, the first 32 go to the low bits of the bytes."""
    first, second = codes.unflatten(-1, (-1, 2, 32)).unbind(dim=-2)
    return _bytes(first | second << 4).flatten(1)


def _q4_k(blocks: Tensor, *, searches: bool = False) -> Tensor:
    scale, minimum, scales, minima, codes = _groups(blocks, 32, 15, 63, searches=searches)
    return torch.cat(
        [_half(scale), _half(minimum), _six_bits(scales, minima), _pairs(codes)], dim=-1
    )


def _q5_k(blocks: Tensor) -> Tensor:
    scale, minimum, scales, minima, codes = _groups(blocks, 32, 31, 63)
    # Bit j of byte i is the fifth of number i of group j.
    fifth = ((codes >> 4).view(-1, 8, 32) << torch.arange(8)[:, None]).sum(dim=1)
    packed = [_half(scale), _half(minimum), _six_bits(scales, minima), _bytes(fifth)]
    return torch.cat([*packed, _pairs(codes & 15)], dim=-1)


def _quarters(codes: Tensor) -> Tensor:
    """Pack 2-bit codes: each 128 codes are four runs of 32, which share bytes.

    The first run goes to the lowest bits.
    """
    runs = codes.unflatten(-1, (-1, 4, 32))
    return _bytes((runs << (2 * torch.arange(4))[:, None]).sum(dim=-2)).flatten(1)


def _q2_k(blocks: Tensor) -> Tensor:
    scale, minimum, scales, minima, codes = _groups(blocks, 16, 3, 15)
    return torch.cat(
        [_bytes(scales | minima << 4), _quarters(codes), _half(scale), _half(minimum)], dim=-1
    )


def _signed(blocks: Tensor, size: int, top: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scale of the scales, the groups' signed codes, and the numbers' codes.

    The numbers' codes begin at 0.
    """
    parts = blocks.unflatten(-1, (-1, size))
    scales = _farthest(parts).squeeze(-1) / -top
    of_scales = (_farthest(scales) / -most).half().float()
    scale_codes = _codes(scales * _inverse(of_scales), -most, most - 1)
    scale = of_scales * scale_codes
    codes = _codes(parts * _inverse(scale)[..., None] + top, 0, 2 * top - 1)
    return of_scales, scale_codes, codes.flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    scale, scales, codes = _signed(blocks, 16, 4, 32)
    high = ((codes >> 2).view(-1, 8, 32) << torch.arange(8)[:, None]).sum(dim=1)
    coded = scales + 32
    low = coded[:, :8] & 15 | (coded[:, 8:] & 15) << 4
    upper = ((coded >> 4).view(-1, 4, 4) << (2 * torch.arange(4))[:, None]).sum(dim=1)
    packed = [_bytes(high), _quarters(codes & 3), _bytes(low), _bytes(upper), _half(scale)]
    return torch.cat(packed, dim=-1)


def _q6_k(blocks: Tensor) -> Tensor:
    scale, scales, codes = _signed(blocks, 16, 32, 128)
    runs = codes.unflatten(-1, (2, 4, 32))
    low = _bytes(runs[:, :, :2] & 15 | (runs[:, :, 2:] & 15) << 4).flatten(1)
    high = _bytes((runs >> 4 << (2 * torch.arange(4))[:, None]).sum(dim=-2)).flatten(1)
    signed = scales.to(torch.int8).view(torch.uint8)
    return torch.cat([low, high, signed, _half(scale)], dim=-1)


def _nearest(numbers: Tensor, values: Tensor) -> Tensor:
    """Return the indices of the nearest of `values`, which are in ascending order."""
    borders = (values[1:] + values[:-1]) / 2
    return torch.bucketize(numbers.contiguous(), borders).to(torch.int32)


def _iq4_nl(blocks: Tensor) -> Tensor:
    values = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    scale = _farthest(blocks) / values[0]
    return torch.cat([_half(scale), _halves(_nearest(blocks * _inverse(scale), values))], dim=-1)


def _iq4_xs(blocks: Tensor) -> Tensor:
    values = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    parts = blocks.unflatten(-1, (-1, 32))
    scales = _farthest(parts).squeeze(-1) / values[0]
    of_scales = (_farthest(scales) / -32).half().float()
    scale_codes = _codes(scales * _inverse(of_scales), -32, 31)
    scale = of_scales * scale_codes
    codes = _nearest(parts * _inverse(scale)[..., None], values)
    coded = scale_codes + 32
    upper = (coded >> 4 << 2 * torch.arange(8)).sum(dim=-1, keepdim=True)
    low = coded[:, 0::2] & 15 | (coded[:, 1::2] & 15) << 4
    packed = [_half(of_scales), _bytes(upper & 255), _bytes(upper >> 8), _bytes(low)]
    return torch.cat([*packed, _halves(codes).flatten(1)], dim=-1)


def _mxfp4(blocks: Tensor) -> Tensor:
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    # With this exponent the largest number lies in the last octave, from 4 to 6.
    exponent = torch.where(largest > 0, largest.log2().floor() - 2, -127.0).clamp_(-127, 127)
    magnitudes = torch.tensor(_E2M1)
    codes = _nearest(blocks.abs() * torch.exp2(-exponent), magnitudes)
    signed = codes | (blocks < 0).to(torch.int32) << 3
    return torch.cat([_bytes(exponent + 127), _halves(signed)], dim=-1)


_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
}
ENCODED_FORMS = (*_PLAIN, *_ENCODERS)


def encode(weight: Tensor, form: str, *, searches: bool = False) -> StoredMatrix:
    """Round a matrix to a stored form.

    Args:
        weight: `[out_features, in_features]`, any floating dtype, finite, on the CPU.
        form: one of `ENCODED_FORMS`.
        searches: for q4_k, whether to search for better scales, which takes about thirty times as
            long.

    Returns:
        The matrix. Its bytes are a view of `weight` if the form is the dtype of `weight`.

    Raises:
        ValueError: the form is not in `ENCODED_FORMS`, or `in_features` is not a whole number of
            its blocks.
    """
    if form not in ENCODED_FORMS:
        raise ValueError(f"{form!r} is not among the forms to encode: {', '.join(ENCODED_FORMS)}")
    layout = find_form(form)
    out_features, in_features = weight.shape
    width = layout.row_bytes(in_features)
    if form in _PLAIN:
        return StoredMatrix(form, weight.to(_PLAIN[form]).contiguous().view(torch.uint8))
    encode_blocks = _ENCODERS[form]
    if searches and form == "q4_k":
        encode_blocks = partial(_q4_k, searches=True)
    data = torch.empty(out_features, width, dtype=torch.uint8)
    rows = max(1, _AT_ONCE // in_features)
    for part, to in zip(weight.split(rows), data.split(rows), strict=True):
        blocks = part.float().reshape(-1, layout.block_values)
        to.copy_(encode_blocks(blocks).view(to.shape))
    return StoredMatrix(form, data)
