"""Encodes one-dimensional numpy arrays in msgspec structs, as their bytes.

The field of a struct is declared as `NDArray` with its number type. The receiver reads the bytes as
this type, so the sender's array must have it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray


def encode_array(value: object) -> bytes:
    """Return the bytes of an array; the `enc_hook` of a msgspec encoder.

    Raises:
        NotImplementedError: the value is not a one-dimensional array.
    """
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} has no encoding")


def decode_array(kind: Any, data: Any) -> NDArray[Any]:
    """Return the array of a field declared as `kind`; the `dec_hook` of a msgspec decoder.

    Raises:
        ValueError: the length of `data` does not fit the number type; the message is then rejected.
    """
    # The bytes are copied, because torch does not accept a read-only buffer.
    return np.frombuffer(bytearray(data), dtype=_dtype(kind))


@cache
def _dtype(kind: Any) -> np.dtype[Any]:
    """Return the number type of a declared type `NDArray[number type]`."""
    _, dtype = get_args(kind)
    return np.dtype(get_args(dtype)[0])
