"""Passes host arrays to the device: without a copy on a CPU, with one pinned copy on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
}


def to_device(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Return each array as a tensor on `device`.

    On a GPU the arrays are packed into one pinned buffer, and sent with one asynchronous copy.
    torch's host allocator keeps the buffer until the copy is done. On a CPU the tensors share the
    arrays' memory.

    Args:
        device: the target device.
        arrays: contiguous arrays of int32, int64, float32 or uint8.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    pinned = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = pinned.numpy()
    for array, start in zip(arrays, offsets, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    sent = pinned.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, offsets, strict=False)
    ]
