"""Reads the headers of safetensors files: the tensors and their positions. No torch.

Source: the format, which is an 8-byte little-endian length, JSON of that length, then the tensors'
bytes.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import re
import struct
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.gguf.tensors import gguf_tensor_infos
from runtime.checkpoint.json_file import read_json_object
from runtime.checkpoint.regular_file import open_regular
from runtime.checkpoint.tensor_info import TensorInfo
from runtime.errors import StartupError

# The maximum number of characters of one entry of the JSON, which is decoded at once; real entries
# are shorter.
MAX_ENTRY_CHARS = 2**19
_PIECE_BYTES = 2**20
_SPACES = re.compile(r"[ \t\r\n]*")
_decoder = json.JSONDecoder()


class Reader(Protocol):
    """An object that bytes are read from, such as an open file."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes; none at the end."""


def entries(file: Reader, num_bytes: int) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the JSON object in the next `num_bytes` of `file`, in order.

    Raises:
        ValueError: the bytes are not a JSON object, or an entry is longer than `MAX_ENTRY_CHARS`.
        RecursionError: a value is nested too deeply.
    """
    text = _Text(file, num_bytes)
    text.take("{")
    if text.next() == "}":
        text.take("}")
    else:
        while True:
            name = text.value()
            if not isinstance(name, str):
                raise ValueError("a name is not a string")
            text.take(":")
            yield name, text.value()
            if text.next() == "}":
                text.take("}")
                break
            text.take(",")
    if text.next():
        raise ValueError("more than one object")


class _Text:
    """A buffer that moves along the JSON text.

    It has the whole next entry, unless the entry is too long.
    """

    def __init__(self, file: Reader, num_bytes: int) -> None:
        self._file = file
        self._rest = num_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._window = ""
        self._at = 0

    def _fill(self) -> None:
        if not self._rest or len(self._window) - self._at >= 2 * MAX_ENTRY_CHARS:
            return
        data = self._file.read(min(_PIECE_BYTES, self._rest))
        self._rest = self._rest - len(data) if data else 0
        self._window = self._window[self._at :] + self._utf8.decode(data, not self._rest)
        self._at = 0

    def next(self) -> str:
        """Return the next character that is not blank, without consuming it; empty at the end."""
        while True:
            self._fill()
            found = _SPACES.match(self._window, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._window) or not self._rest:
                return self._window[self._at : self._at + 1]

    def take(self, wanted: str) -> None:
        """Consume the character `wanted`, which must come next."""
        found = self.next()
        if found != wanted:
            raise ValueError(f"{found!r} in place of {wanted!r}")
        self._at += 1

    def value(self) -> Any:
        """Consume the JSON value that comes next, and return it."""
        self.next()
        # The window is limited, so a value that is too long fails quickly.
        value, end = _decoder.raw_decode(self._window, self._at)
        if end - self._at > MAX_ENTRY_CHARS:
            raise ValueError(f"an entry of more than {MAX_ENTRY_CHARS} characters")
        self._at = end
        return value


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The maximum number of bytes of a header, as in the safetensors library.
MAX_HEADER_BYTES = 100_000_000
# The maximum number of tensors of a model, about ten times as many as the largest models have.
MAX_TENSORS = 2**18
# The beginning of a Git LFS pointer, which a clone without LFS has in place of a large file.
_LFS_PREFIX = b"version "
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


def read_tensor_infos(folder: Path) -> dict[str, TensorInfo]:
    """Read the headers of all weight files of a folder, or of a GGUF model.

    Raises:
        StartupError: the folder has no weights or only pickled ones, a missing, truncated or
            malformed file, or a tensor in two files; the message has one line.
    """
    if is_gguf(folder):
        return gguf_tensor_infos(folder)
    tensors: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        for info in read_header(path):
            if info.name in tensors:
                raise StartupError(
                    f"{folder}: tensor {info.name!r} is in {tensors[info.name].file.name}"
                    f" and in {path.name}"
                )
            tensors[info.name] = info
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of `folder`: the single file, those of the index, or all files.

    Raises:
        StartupError: there are no such files, or a file that the index names is missing.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).is_file():
        return _indexed_files(folder)
    # `consolidated` files have the same weights under other names, and adapters are not models.
    others = sorted(
        path
        for path in folder.glob("*.safetensors")
        if not path.name.startswith(("consolidated", "adapter"))
    )
    if others:
        return others
    pickled = sorted(
        path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}")
        if path.name != "training_args.bin"
    )  # fmt: skip
    if pickled:
        raise StartupError(
            f"{folder} has only pickled weights ({_few(pickled)}), which are not loaded because"
            " they can run code; convert to safetensors: load with transformers, then"
            " `save_pretrained`"
        )
    raise StartupError(
        f"{folder} has no weights: expected {SINGLE_FILE}, {INDEX_FILE} or a GGUF file"
    )


def read_header(path: Path) -> list[TensorInfo]:
    """Read one file's header; return its tensors in the order of their bytes.

    Raises:
        StartupError: the file is not a regular one, truncated or malformed; the message has one
            line.
    """
    try:
        with BufferedReader(open_regular(path)) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise StartupError(f"{path} is truncated: {file_bytes} bytes, no header")
            if prefix == _LFS_PREFIX:
                raise StartupError(
                    f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` there"
                )
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise StartupError(
                    f"{path} is truncated or not a safetensors file: its header would be"
                    f" {header_bytes} bytes of {file_bytes}"
                )
            infos = _read_entries(path, file, header_bytes)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path} has a malformed header: {error}") from error
    infos.sort(key=lambda info: info.start)
    for info in infos:
        if info.end > file_bytes:
            raise StartupError(
                f"{path} is truncated: tensor {info.name!r} ends at byte {info.end} of {file_bytes}"
            )
    return infos


def _read_entries(path: Path, file: Reader, header_bytes: int) -> list[TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for name, entry in entries(file, header_bytes):
        if name == "__metadata__":
            continue
        infos[name] = _tensor_info(path, name, entry, 8 + header_bytes)
        if len(infos) > MAX_TENSORS:
            raise ValueError(f"more than {MAX_TENSORS} tensors")
    return list(infos.values())


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, start, end)
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in numbers):
            raise ValueError
        if (end - start) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise StartupError(
            f"{path} has a malformed header: type, shape and bytes of {name!r} do not agree"
        ) from error
    return TensorInfo(name, dtype, shape, path, data_start + start, data_start + end)


def _indexed_files(folder: Path) -> list[Path]:
    index = read_json_object(folder / INDEX_FILE)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{folder / INDEX_FILE}: 'weight_map' is not an object with tensors")
    names: set[str] = set()
    for name in weight_map.values():
        # A name with a path could lead to any file of this machine.
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise StartupError(f"{folder / INDEX_FILE}: {name!r} is not a file name")
        names.add(name)
    absent = sorted(name for name in names if not (folder / name).is_file())
    if absent:
        raise StartupError(
            f"{folder} lacks {len(absent)} of {len(names)} weight files: {_few(absent)}"
        )
    return [folder / name for name in sorted(names)]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
