"""Turns the bytes of a file into tensors."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoint.gguf.types import BLOCK_TYPES
from runtime.checkpoint.regular_file import open_regular
from runtime.checkpoint.tensor_info import RowOrder, TensorInfo

# torch's types, by the names in safetensors files. All other types that are read are quantized
# blocks of bytes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def map_file(path: Path) -> Tensor:
    """Map a file as a tensor, `[size]` uint8; bytes are read when they are first accessed.

    Raises:
        StartupError: the file is not a regular one; the message has one line.
        OSError: the file cannot be mapped.
    """
    return map_pages(path)[0]


def map_pages(path: Path) -> tuple[Tensor, mmap.mmap]:
    """Map a file like `map_file`; also return the mapping of the tensor, for `drop_pages`."""
    with open_regular(path) as file:
        # The mapping is writable only because torch warns about memory that is not.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8), mapped


def drop_pages(mapped: mmap.mmap) -> None:
    """Take the pages of a mapping out of this process's memory; an access reads them again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def as_tensor(raw: Tensor, info: TensorInfo) -> Tensor:
    """Return the tensor that `raw` stores, with rows in the order of a Hugging Face checkpoint.

    Args:
        raw: `[size]` uint8.
        info: the tensor's description.

    Returns:
        A view if the file has the rows in that order, else a copy. Plain numbers have the shape
        `info.shape`. Quantized blocks have a row of uint8 for each row of numbers.
    """
    dtype = DTYPES.get(info.dtype)
    if dtype is None:
        tensor = raw.view(-1, BLOCK_TYPES[info.dtype].row_bytes(info.shape[-1]))
    else:
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()
        shape = info.shape if info.rows is None else (-1, *info.shape[1:])
        tensor = raw.view(dtype).view(shape)
    if info.interleaved_heads:
        pairs = tensor.unflatten(0, (info.interleaved_heads, -1, 2))
        tensor = pairs.transpose(1, 2).flatten(0, 2)
    if info.rows is not None:
        tensor = _reordered(tensor, info.rows)
    if info.is_decay:
        return tensor.neg().log()
    return tensor - info.offset if info.offset else tensor


def _reordered(tensor: Tensor, rows: RowOrder) -> Tensor:
    groups = tensor[rows.first :].unflatten(0, (rows.left, rows.right, -1))
    found = groups.transpose(0, 1).flatten(0, 2)
    return torch.cat((tensor[: rows.first], found))[rows.begin : rows.end]
