"""Packs quantized integers (codes) of 4 or 8 bits into 32-bit words as tools store them.

Also unpacks such words.

Sources: AutoGPTQ's and GPTQModel's `QuantLinear.pack`, AutoAWQ's `WQLinear_GEMM.from_linear`,
compressed-tensors' `pack_to_int32`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.models.quantization.groups.group_scheme import GroupScheme

# A word of AWQ holds codes 0, 2, 4, 6, 1, 3, 5, 7 of eight, from the lowest bits up. This tuple
# gives the place of each code in the word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 32, bits, dtype=torch.int32, device=device)


def _fields(words: Tensor, bits: int) -> Tensor:
    """Split each word into its codes, uint8 in a new last dimension, from the lowest bits up."""
    mask = 2**bits - 1
    return ((words[..., None] >> _shifts(bits, words.device)) & mask).to(torch.uint8)


def _words(fields: Tensor, bits: int) -> Tensor:
    """Join codes into words; the inverse of `_fields`."""
    wide = fields.to(torch.int64) << _shifts(bits, fields.device).to(torch.int64)
    # The sum is a bitwise or, as bits do not overlap. The highest bit becomes the sign.
    return wide.sum(-1).to(torch.int32)


def _unpack_last(words: Tensor, scheme: GroupScheme, count: int) -> Tensor:
    """Unpack the words of the last dimension, and return the first `count` codes of each row."""
    fields = _fields(words, scheme.bits)
    if scheme.layout == "awq":
        fields = fields[..., list(_AWQ_PLACES)]
    return fields.flatten(-2)[..., :count]


def _pack_last(codes: Tensor, scheme: GroupScheme) -> Tensor:
    of_word = 32 // scheme.bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % of_word))
    fields = padded.unflatten(-1, (-1, of_word))
    if scheme.layout == "awq":
        places = list(_AWQ_PLACES)
        fields = fields[..., [places.index(at) for at in range(of_word)]]
    return _words(fields, scheme.bits)


def unpack_codes(words: Tensor, scheme: GroupScheme, shape: tuple[int, ...]) -> Tensor:
    """Return the codes of a stored matrix of this shape, `[rows, columns]` uint8."""
    rows, columns = shape
    if scheme.layout == "packed":
        return _unpack_last(words, scheme, columns)
    if scheme.layout == "awq":
        return _unpack_last(words, scheme, rows).t()
    return _unpack_last(words.t(), scheme, columns)


def pack_codes(codes: Tensor, scheme: GroupScheme) -> Tensor:
    """Pack codes, `[rows, columns]`, into words; the inverse of `unpack_codes`."""
    if scheme.layout == "packed":
        return _pack_last(codes, scheme)
    if scheme.layout == "awq":
        return _pack_last(codes.t(), scheme)
    return _pack_last(codes, scheme).t().contiguous()


def unpack_zeros(words: Tensor, scheme: GroupScheme, rows: int) -> Tensor:
    """Return the zero points of a stored matrix, `[rows, num_groups]` uint8."""
    if scheme.layout == "packed":
        return _unpack_last(words.t(), scheme, rows).t()
    found = _unpack_last(words, scheme, rows).t()
    if scheme.layout == "gptq":
        found = (found + 1) & (2**scheme.bits - 1)
    return found


def pack_zeros(zeros: Tensor, scheme: GroupScheme) -> Tensor:
    """Pack zero points, `[rows, num_groups]`, into words; the inverse of `unpack_zeros`."""
    if scheme.layout == "packed":
        return _pack_last(zeros.t(), scheme).t().contiguous()
    if scheme.layout == "gptq":
        zeros = (zeros.to(torch.int32) - 1).to(torch.uint8) & (2**scheme.bits - 1)
    return _pack_last(zeros.t(), scheme)


def scales_by_row(scales: Tensor, scheme: GroupScheme) -> Tensor:
    """Convert scales from the stored shape to `[rows, num_groups]`, or back to the stored one."""
    return scales if scheme.layout == "packed" else scales.t().contiguous()
