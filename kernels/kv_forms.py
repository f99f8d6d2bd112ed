"""The formats in which a KV cache stores keys and values: the model's dtype, or fewer bits.

A row holds the key or the value of one head of one token. 8-bit floats have no scale: a number
beyond their range becomes the largest 8-bit float. An int8 row has a scale of its own, a float32 in
the last four bytes of the row, so the row is wider than the head. Kernels recognise the form by the
dtype of the cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FLOATS_OF_8_BITS", "KV_FORMS", "KvForm", "head_elements", "kept", "numbers"]


@dataclass(frozen=True)
class KvForm:
    """A form in which a KV cache stores keys and values.

    Attributes:
        dtype: dtype of the cache; `None` for the model's dtype.
        extra: number of elements of a row after those of the head.
    """

    dtype: torch.dtype | None
    extra: int = 0

    def row_elements(self, head_dim: int) -> int:
        """Return the elements of a row whose head has `head_dim` elements."""
        return head_dim + self.extra


_SCALE_BYTES = 4
# The forms by their names in `--kv-cache-dtype`, in the order of `Kept` in kernels/cpu/kept.h.
KV_FORMS: dict[str, KvForm] = {
    "auto": KvForm(None),
    "bf16": KvForm(torch.bfloat16),
    "fp8_e4m3": KvForm(torch.float8_e4m3fn),
    "fp8_e5m2": KvForm(torch.float8_e5m2),
    "int8": KvForm(torch.int8, _SCALE_BYTES),
}
FLOATS_OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_LARGEST_CODE = 127


def kept(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert rows to the form of a cache of this dtype, rounded to nearest, ties to even.

    Args:
        rows: `[..., head_dim]`, any floating dtype.
        dtype: dtype of the cache.

    Returns:
        `[..., row_elements]` of `dtype`. In a floating dtype a NaN stays a NaN. In int8 a NaN or an
        infinity makes the whole row NaN.
    """
    if dtype is torch.int8:
        wide = rows.float()
        top = wide.abs().nan_to_num(0.0, posinf=0.0).amax(dim=-1, keepdim=True)
        # The divisors are tensors, because torch divides by a plain number by multiplying by its
        # inverse, which rounds twice.
        most_codes = torch.full_like(top, _LARGEST_CODE)
        inverse = torch.where(top > 0, most_codes / top, 0.0)
        codes = (wide.nan_to_num(0.0, 0.0, 0.0) * inverse).round().to(torch.int8)
        bad = ~wide.isfinite().all(dim=-1, keepdim=True)
        scale = (top / most_codes).masked_fill(bad, torch.nan)
        return torch.cat((codes, scale.view(torch.int8)), dim=-1)
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        return rows.float().clamp(-most, most).to(dtype)
    return rows.to(dtype)


def head_elements(cache: Tensor) -> int:
    """Return how many elements of a row of `cache` belong to the head."""
    return cache.shape[-1] - (_SCALE_BYTES if cache.dtype is torch.int8 else 0)


def numbers(rows: Tensor) -> Tensor:
    """Convert rows of a cache back to numbers, float32 `[..., head_dim]`."""
    if rows.dtype is torch.int8:
        scale = rows[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
        return rows[..., :-_SCALE_BYTES].float() * scale
    return rows.float()
