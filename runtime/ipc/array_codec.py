"""Arrays of numbers in msgspec structs: one-dimensional, as the bytes of their numbers.

A field is declared as `NDArray` of its number type, which is what the receiver reads the bytes as:
the sender's array must have that type.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray


def encode_array(value: object) -> bytes:
    """An `enc_hook` of msgspec.

    Raises:
        NotImplementedError: not an array of one dimension.
    """
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} has no encoding")


def decode_array(kind: Any, data: Any) -> NDArray[Any]:
    """A `dec_hook` of msgspec.

    Raises:
        ValueError: `data` are not bytes of whole numbers; the message is then rejected.
    """
    # A copy: torch takes no view of numbers that cannot be written.
    return np.frombuffer(bytearray(data), dtype=_dtype(kind))


@cache
def _dtype(kind: Any) -> np.dtype[Any]:
    """The number type of `NDArray[number type]`."""
    _, dtype = get_args(kind)
    return np.dtype(get_args(dtype)[0])
