"""Reads the header of a GGUF file: its metadata, and the tensors' positions. No torch.

A hostile file may have any number anywhere. So counts and lengths are checked against the file's
size before anything is read or allocated, and arrays stay bytes until they are used.

Source: the format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file begins with
its magic, its version, the numbers of tensors and of keys, and the keys. Then come the name, shape,
type and offset of each tensor, and last the tensors' bytes.
"""

from __future__ import annotations

import math
import os
import struct
from array import array
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from runtime.checkpoint.gguf.types import TYPES, UNREAD, BlockType
from runtime.checkpoint.regular_file import open_regular
from runtime.errors import StartupError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Bounds, about ten times the largest known headers.
MAX_HEADER_BYTES = 2**28
_MAX_KEYS = 2**16
_MAX_TENSORS = 2**18
_MAX_NAME_BYTES = 2**16
_MAX_TEXT_BYTES = 2**24
_MAX_DIMS = 4
_MAX_NESTING = 4
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 2**20
_CHUNK_BYTES = 2**20
# The `struct` code of each type, by the type's number in the file.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_FLOAT32 = 6
_LFS_PREFIX = b"vers"


class GgufTensor(NamedTuple):
    """One tensor of a GGUF file.

    Attributes:
        name: the tensor's name.
        type: how its numbers are stored.
        shape: rows first, as in all of this code; the file has the reverse order.
        file: the file that has its bytes.
        start: position of its bytes in the file.
        size_bytes: number of its bytes.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    file: Path
    start: int
    size_bytes: int


@dataclass(frozen=True)
class GgufArray:
    """An array in the metadata, still as bytes.

    Attributes:
        kind: the number by which GGUF identifies the elements' type.
        count: number of elements.
        data: bytes of the elements.
    """

    kind: int
    count: int
    data: bytes

    @property
    def is_text(self) -> bool:
        """Whether the elements are strings."""
        return self.kind == _STRING

    def numbers(self) -> list[Any]:
        """Return the elements of an array of numbers or flags.

        Raises:
            ValueError: the elements are something else.
        """
        code = _SCALARS.get(self.kind)
        if code is None:
            raise ValueError("not an array of numbers")
        if code == "?":
            return [byte != 0 for byte in self.data]
        # `array` has the same code and size for each of these types as `struct`.
        values = array(code, self.data)
        return values.tolist()

    def texts(self) -> list[str]:
        """Return the elements of an array of strings.

        Raises:
            ValueError: the elements are not strings, or one is not UTF-8.
        """
        if not self.is_text:
            raise ValueError("not an array of strings")
        return self._texts

    @cached_property
    def _texts(self) -> list[str]:
        # The list is kept because the configuration and the tokenizer read the same vocabulary.
        data, position, found = self.data, 0, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(self.count):
            start = position + 8
            position = start + length_at(data, position)[0]
            found.append(data[start:position].decode())
        return found


@dataclass(frozen=True)
class GgufFile:
    """The contents of a header.

    Attributes:
        path: the file; of a split model, the first one.
        metadata: values by key: numbers, flags, texts, and arrays as `GgufArray`.
        tensors: the tensors, in the order of the header.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: list[GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of one file.

    Raises:
        StartupError: the file is not a GGUF file, has an unknown version, is truncated or
            malformed, or has a number out of bounds; the message has one line.
    """
    try:
        with open_regular(path) as file:
            return _Header(path, file).read()
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error


class _Header:
    """Reads one header from its beginning to its end, in chunks."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self._path, self._file = path, file
        self._size = os.fstat(file.fileno()).st_size
        self._data = bytearray()
        self._at = 0

    def read(self) -> GgufFile:
        magic = self._take(4, "its magic")
        if magic == _LFS_PREFIX:
            raise StartupError(
                f"{self._path} is a Git LFS pointer, not the weights: run `git lfs pull` there"
            )
        if magic != MAGIC:
            raise StartupError(f"{self._path} is not a GGUF file: it begins with {magic!r}")
        version = self._number("I")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise StartupError(f"{self._path} is a big-endian GGUF file; only others are read")
            raise StartupError(f"{self._path} is GGUF version {version}; 2 and 3 are read")
        num_tensors = self._count("Q", _MAX_TENSORS, 24, "tensors")
        num_keys = self._count("Q", _MAX_KEYS, 13, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text(_MAX_NAME_BYTES, "a key")
            if key in metadata:
                raise self._malformed(f"the key {key[:64]!r} comes twice")
            metadata[key] = self._value(self._number("I"), key)
        listed = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise self._malformed(f"general.alignment is {alignment!r}")
        data_start = -(-self._at // alignment) * alignment
        tensors = [each._replace(start=data_start + each.start) for each in listed]
        names: set[str] = set()
        for tensor in tensors:
            if tensor.name in names:
                raise self._malformed(f"tensor {tensor.name[:64]!r} comes twice")
            names.add(tensor.name)
            end = tensor.start + tensor.size_bytes
            if end > self._size:
                raise StartupError(
                    f"{self._path} is truncated: tensor {tensor.name!r} ends at byte {end} of"
                    f" {self._size}"
                )
        return GgufFile(self._path, metadata, tensors)

    def _tensor(self) -> GgufTensor:
        name = self._text(_MAX_NAME_BYTES, "the name of a tensor")
        shown = name[:64]
        num_dims = self._number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._malformed(f"tensor {shown!r} has {num_dims} dimensions")
        dims = [self._number("Q") for _ in range(num_dims)]
        kind = self._number("I")
        offset = self._number("Q")
        if kind not in TYPES:
            named = UNREAD.get(kind, f"number {kind}")
            known = ", ".join(each.name for each in TYPES.values())
            raise StartupError(
                f"{self._path}: tensor {shown!r} is of type {named}, which is not read; these are:"
                f" {known}"
            )
        stored = TYPES[kind]
        count = math.prod(dims)
        # Checked here, so that later code need not handle products with a thousand digits.
        if not 0 < count < 2**63 or dims[0] % stored.block or offset >= 2**63:
            raise self._malformed(f"tensor {shown!r} is {dims} of {stored.name} at byte {offset}")
        size = count // stored.block * stored.block_bytes
        return GgufTensor(name, stored, tuple(reversed(dims)), self._path, offset, size)

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._text(_MAX_TEXT_BYTES, key)
        if kind == _ARRAY:
            return self._array(key, depth)
        code = _SCALARS.get(kind)
        if code is None:
            raise self._malformed(f"{key[:64]!r} is of type {kind}")
        value = self._number(code)
        return _shortest(value) if kind == _FLOAT32 else value

    def _array(self, key: str, depth: int) -> GgufArray:
        kind = self._number("I")
        if kind == _ARRAY:
            # A nested array is skipped, because no known key has one.
            if depth >= _MAX_NESTING:
                raise self._malformed(f"{key[:64]!r} is an array in an array in an array")
            for _ in range(self._count("Q", MAX_HEADER_BYTES, 12, key)):
                self._array(key, depth + 1)
            return GgufArray(kind, 0, b"")
        if kind == _STRING:
            count = self._count("Q", MAX_HEADER_BYTES, 8, key)
            start = self._at
            self._skip_texts(count, key)
            return GgufArray(kind, count, bytes(self._data[start : self._at]))
        code = _SCALARS.get(kind)
        if code is None:
            raise self._malformed(f"{key[:64]!r} is an array of type {kind}")
        size = struct.calcsize("<" + code)
        count = self._count("Q", MAX_HEADER_BYTES, size, key)
        return GgufArray(kind, count, self._take(count * size, key))

    def _count(self, code: str, most: int, least_bytes: int, what: str) -> int:
        """Read a number of elements, each of which needs at least `least_bytes` in the file."""
        count = self._number(code)
        if count > most or count * least_bytes > self._size - self._at:
            raise self._malformed(
                f"{count} elements of {what[:64]} in a file of {self._size} bytes"
            )
        return count

    def _text(self, most: int, what: str) -> str:
        length = self._number("Q")
        if length > most:
            raise self._malformed(f"{what[:64]} would be {length} bytes long")
        return self._take(length, what).decode(errors="replace")

    def _number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self._require(size, "a number")
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += size
        return value

    def _take(self, size: int, what: str) -> bytes:
        self._require(size, what)
        start, self._at = self._at, self._at + size
        return bytes(self._data[start : self._at])

    def _skip_texts(self, count: int, what: str) -> None:
        # A vocabulary has hundreds of thousands of texts, so a text that is in the buffer already
        # costs no call of a method.
        length_at = struct.Struct("<Q").unpack_from
        data, at = self._data, self._at
        for _ in range(count):
            try:
                at += 8 + length_at(data, at)[0]
            except (struct.error, OverflowError):
                # The length is not in the buffer yet, or the file ends before it.
                self._require(at + 8 - self._at, what)
                at += 8 + length_at(data, at)[0]
        self._require(at - self._at, what)
        self._at = at

    def _require(self, size: int, what: str) -> None:
        """Read on until the next `size` bytes are in the buffer."""
        end = self._at + size
        if end <= len(self._data):
            return
        if end > self._size:
            raise StartupError(
                f"{self._path} is truncated or malformed: {what[:64]} ends at byte {end} of"
                f" {self._size}"
            )
        if end > MAX_HEADER_BYTES:
            raise self._malformed(f"its header is longer than {MAX_HEADER_BYTES} bytes")
        while len(self._data) < end:
            wanted = max(end - len(self._data), _CHUNK_BYTES)
            more = self._file.read(min(wanted, self._size - len(self._data)))
            if not more:
                raise StartupError(f"{self._path} was cut short while it was read")
            self._data += more

    def _malformed(self, what: str) -> StartupError:
        return StartupError(f"{self._path} has a malformed header: {what}")


def _shortest(value: float) -> float:
    """Return the shortest number with the same float32 value: 1e-05 for 9.99999975e-06."""
    if not math.isfinite(value):
        return value
    same = struct.pack("<f", value)
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == same:
            return short
    return value
