"""Decodes the bytes of each stored form to numbers, in plain torch.

The layouts are GGML's (`ggml-common.h`). The numbers equal those of `gguf.dequantize` in float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.quantized_linear.forms import find_form

__all__ = ["IQ4_VALUES", "MXFP4_VALUES", "decode"]

# The 16 values of a 4-bit code. The values for MXFP4 are twice the actual ones, so its scale is
# halved.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(raw: Tensor) -> Tensor:
    """Return two bytes of each block, a float16, as float32 `[num_blocks, 1]`."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor, group: int) -> Tensor:
    """Return 4-bit codes, `[num_blocks, values]`.

    The codes of each `group` bytes are the low halves of all bytes, then the high halves.
    """
    parts = raw.unflatten(-1, (-1, group))
    return torch.stack([parts & 15, parts >> 4], dim=-2).flatten(1)


def _fields(raw: Tensor, group: int, bits: int) -> Tensor:
    """Return codes of `bits` bits.

    The codes of each `group` bytes are the lowest fields of all bytes, then the next fields, and so
    on.
    """
    parts = raw.unflatten(-1, (-1, group))
    mask = (1 << bits) - 1
    return torch.stack([(parts >> s) & mask for s in range(0, 8, bits)], dim=-2).flatten(1)


def _scaled(quants: Tensor, scales: Tensor) -> Tensor:
    """Multiply values by scales; each scale belongs to one of `scales.shape[1]` equal groups."""
    return (quants.float().unflatten(-1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


def _q4_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:], 16).float() - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:], 16).float() + _half(raw[:, 2:4])


def _fifth_bits(raw: Tensor) -> Tensor:
    """Return the fifth bit of each of a block's 32 codes, as 16 or 0."""
    return torch.stack([(raw >> bit) & 1 for bit in range(8)], dim=-1).flatten(1) << 4


def _q5_0(raw: Tensor) -> Tensor:
    quants = _nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6])
    return _half(raw[:, :2]) * (quants.float() - 16)


def _q5_1(raw: Tensor) -> Tensor:
    quants = _nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8])
    return _half(raw[:, :2]) * quants.float() + _half(raw[:, 2:4])


def _q8_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * raw[:, 2:].contiguous().view(torch.int8).float()


def _q2_k(raw: Tensor) -> Tensor:
    scales = _half(raw[:, 80:82]) * (raw[:, :16] & 15).float()
    least = _half(raw[:, 82:84]) * (raw[:, :16] >> 4).float()
    return _scaled(_fields(raw[:, 16:80], 32, 2), scales) - least.repeat_interleave(16, 1)


def _q3_k(raw: Tensor) -> Tensor:
    low = _nibbles(raw[:, 96:104], 8)
    high = _fields(raw[:, 104:108], 4, 2)
    scales = _half(raw[:, 108:110]) * ((low | high << 4).float() - 32)
    quants = _fields(raw[:, 32:96], 32, 2) | _fields(raw[:, :32], 32, 1) << 2
    return _scaled(quants.float() - 4, scales)


def _scales_of_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 minima that are stored in 12 bytes, 6 bits each."""
    first, second, rest = raw[:, :4], raw[:, 4:8], raw[:, 8:12]
    scales = torch.cat([first & 63, (rest & 15) | (first >> 2) & 48], dim=1)
    least = torch.cat([second & 63, (rest >> 4) | (second >> 2) & 48], dim=1)
    return scales.float(), least.float()


def _k_with_minima(raw: Tensor, quants: Tensor) -> Tensor:
    scales, least = _scales_of_k(raw[:, 4:16])
    lowest = (_half(raw[:, 2:4]) * least).repeat_interleave(32, 1)
    return _scaled(quants, _half(raw[:, :2]) * scales) - lowest


def _q4_k(raw: Tensor) -> Tensor:
    return _k_with_minima(raw, _nibbles(raw[:, 16:], 32))


def _q5_k(raw: Tensor) -> Tensor:
    return _k_with_minima(raw, _nibbles(raw[:, 48:], 32) | _fields(raw[:, 16:48], 32, 1) << 4)


def _q6_k(raw: Tensor) -> Tensor:
    quants = _nibbles(raw[:, :128], 64) | _fields(raw[:, 128:192], 32, 2) << 4
    scales = raw[:, 192:208].contiguous().view(torch.int8).float()
    return _scaled(quants.float() - 32, _half(raw[:, 208:210]) * scales)


def _looked_up(values: tuple[int, ...], nibbles: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[nibbles.int()]


def _iq4_nl(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * _looked_up(IQ4_VALUES, _nibbles(raw[:, 2:], 16))


def _iq4_xs(raw: Tensor) -> Tensor:
    low = torch.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], dim=-1).flatten(1)
    high = torch.stack([(raw[:, 2:4] >> s) & 3 for s in range(0, 8, 2)], dim=-1).flatten(1)
    scales = _half(raw[:, :2]) * ((low | high << 4).float() - 32)
    return _scaled(_looked_up(IQ4_VALUES, _nibbles(raw[:, 8:], 16)), scales)


def _mxfp4(raw: Tensor) -> Tensor:
    exponent = raw[:, :1].int()
    # Half of 2 ** (exponent - 127). The two smallest results are subnormal in float32.
    small = torch.tensor(0x00200000, dtype=torch.int32) << exponent.clamp(max=1)
    bits = torch.where(exponent < 2, small, (exponent - 1) << 23)
    return bits.view(torch.float32) * _looked_up(MXFP4_VALUES, _nibbles(raw[:, 1:], 16))


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
}
_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def decode(form: str, data: Tensor) -> Tensor:
    """Return the float32 numbers of `[rows, row_bytes]` uint8 rows. Shapes are not checked."""
    if form in _FLOATS:
        return data.contiguous().view(_FLOATS[form]).float()
    blocks = data.reshape(-1, find_form(form).block_bytes)
    return _DECODERS[form](blocks).view(data.shape[0], -1)
