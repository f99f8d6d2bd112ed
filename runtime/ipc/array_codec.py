"""Encodes one-dimensional arrays of numbers in msgspec structs, as their bytes.

A field is declared as `NDArray` of its number type. The receiver reads the bytes as that type, so
the sender's array must have it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray


def encode_array(value: object) -> bytes:
    """An `enc_hook` for msgspec.

    Raises:
        NotImplementedError: the value is not an array of one dimension.
    """
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} has no encoding")


def decode_array(kind: Any, data: Any) -> NDArray[Any]:
    """A `dec_hook` for msgspec.

    Raises:
        ValueError: `data` are not bytes of whole numbers; the message is then rejected.
    """
    # A copy: torch does not accept a read-only buffer.
    return np.frombuffer(bytearray(data), dtype=_dtype(kind))


@cache
def _dtype(kind: Any) -> np.dtype[Any]:
    """The number type of `NDArray[number type]`."""
    _, dtype = get_args(kind)
    return np.dtype(get_args(dtype)[0])
