"""Reads weights from files again, without mapping them, and detects whether files have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoint.check import CheckpointSummary, check_model_folder
from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.regular_file import open_regular
from runtime.checkpoint.tensor_info import TensorInfo
from runtime.errors import StartupError
from runtime.weights.stored_tensors import as_tensor

# Bytes for one call: the operating system reads at most 2 GiB at once.
_READ_BYTES = 1 << 30

_Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class WeightFiles:
    """The weights in a checked folder, as its files were when it was opened.

    Attributes:
        summary: the tensors in the files.
        stamps: size, time of change in nanoseconds and inode of each file.
    """

    summary: CheckpointSummary
    stamps: dict[Path, _Stamp]

    @classmethod
    def open(cls, folder: Path, config: ModelSpec) -> WeightFiles:
        """Read and check the headers of the files in a folder.

        Raises:
            StartupError: the headers cannot be read or do not fit `config`; the message has one
                line.
        """
        summary = check_model_folder(folder, config)
        paths = {info.file for info in summary.tensors.values()}
        return cls(summary, {path: _stamp(path) for path in paths})

    def changed(self) -> Path | None:
        """Return a file that has changed since the folder was opened; `None` if none has."""
        for path, stamp in self.stamps.items():
            try:
                if _stamp(path) != stamp:
                    return path
            except StartupError:
                return path
        return None

    def tensors(
        self, is_skipped: Callable[[str], bool] = lambda _: False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors one by one, in the order of the bytes on disk.

        The files are read, not mapped: reading a mapped file that was truncated would end the
        process.

        Args:
            is_skipped: whether a tensor, given by name, is left out.

        Raises:
            StartupError: a file cannot be read, or has changed since the folder was opened.
        """
        tensors = self.summary.tensors.items()
        named = [(name, info) for name, info in tensors if not is_skipped(name)]
        for path, infos in groupby(named, key=lambda item: item[1].file):
            yield from read_tensors(path, infos)
        path_changed = self.changed()
        if path_changed is not None:
            raise StartupError(f"{path_changed} was changed while it was read")


def read_tensors(
    path: Path, infos: Iterable[tuple[str, TensorInfo]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of one file under the given names, each in memory of its own.

    Raises:
        StartupError: the file cannot be read, or is truncated.
    """
    try:
        with open_regular(path) as file:
            for name, info in infos:
                yield name, _read(file, info)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error


def _read(file: FileIO, info: TensorInfo) -> Tensor:
    file.seek(info.start)
    raw = torch.empty(info.size_bytes, dtype=torch.uint8)
    view = memoryview(raw.numpy()).cast("B")  # type: ignore[arg-type]  # arrays have buffers
    while len(view):
        count = file.readinto(view[:_READ_BYTES])
        if not count:
            raise StartupError(f"{info.file} ends inside of tensor {info.name!r}")
        view = view[count:]
    return as_tensor(raw, info)


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns, found.st_ino
