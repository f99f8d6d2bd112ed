"""Reads the tensors of a checked checkpoint: views of mapped files, or copies on a GPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.checkpoint.check import CheckpointSummary
from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.tensor_info import TensorInfo
from runtime.errors import StartupError
from runtime.weights.stored_tensors import as_tensor, drop_pages, map_file, map_pages

# Number of threads. One thread moves 3 to 6 GB/s from the page cache to a GPU, several about three
# times as much.
_READERS = 4
# The maximum number of bytes of copies that wait on the device to be used; one more tensor may be
# on its way.
_AHEAD_BYTES = 2 * 2**30


def checkpoint_tensors(
    summary: CheckpointSummary, device: torch.device, cuts: Mapping[str, Callable[[Tensor], Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checked folder one by one, in the order of the bytes on disk.

    For the CPU, a tensor is a view of the mapped file, which must not be written. For a GPU,
    several threads read ahead. They copy to the device only the part that `cuts` returns.

    Args:
        summary: the checked folder.
        device: where the tensors are needed.
        cuts: for each name, the function that returns the rank's part of the tensor.

    Raises:
        StartupError: a file has changed since it was checked.
    """
    if device.type == "cpu":
        yield from _views(summary.tensors)
    else:
        yield from copies(summary.tensors, device, cuts)


def _views(infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    for path, of_file in groupby(infos.items(), key=lambda item: item[1].file):
        try:
            if is_gguf(path):
                mapped, pages = map_pages(path)
                for name, info in of_file:
                    yield name, as_tensor(mapped[info.start : info.end], info)
                # Most tensors were copied. One that is kept as a view needs only the pages that it
                # reads from now on.
                drop_pages(pages)
                continue
            with safe_open(path, framework="pt", device="cpu") as file:
                for name, info in of_file:
                    yield name, file.get_tensor(info.name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error


def copies(
    infos: Mapping[str, TensorInfo],
    device: torch.device,
    cuts: Mapping[str, Callable[[Tensor], Tensor]],
    ahead_bytes: int = _AHEAD_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of tensors on `device`, in the order of `infos`, made by several threads.

    Args:
        infos: the tensors to read, by the names under which they are yielded.
        device: the device of the copies.
        cuts: for some names, the function that returns the part of the tensor to copy. Other
            tensors are copied whole.
        ahead_bytes: maximum number of bytes of copies that wait to be used.

    Raises:
        StartupError: a file cannot be read.
    """
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for path in dict.fromkeys(info.file for info in infos.values()):
            try:
                files[path] = (
                    map_file(path)
                    if is_gguf(path)
                    else stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                )
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error

        # A lock, because the library does not say that several threads may use a file. It costs no
        # time, because making a view is fast.
        one_by_one = threading.Lock()

        def read(name: str, info: TensorInfo) -> Tensor:
            try:
                file = files[info.file]
                if isinstance(file, Tensor):
                    view = as_tensor(file[info.start : info.end], info)
                else:
                    with one_by_one:
                        view = file.get_tensor(info.name)
            except (SafetensorError, OSError) as error:
                raise _unreadable(info.file, error) from error
            if name in cuts:
                view = cuts[name](view)
            return view.to(device, copy=True)

        pool = stack.enter_context(ThreadPoolExecutor(_READERS, thread_name_prefix="weights"))
        waiting: deque[tuple[str, int, Future[Tensor]]] = deque()
        ahead = 0
        try:
            for name, info in infos.items():
                while waiting and ahead + info.size_bytes > ahead_bytes:
                    first, size_bytes, future = waiting.popleft()
                    yield first, future.result()
                    ahead -= size_bytes
                waiting.append((name, info.size_bytes, pool.submit(read, name, info)))
                ahead += info.size_bytes
            for first, _, future in waiting:
                yield first, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _unreadable(path: Path, error: Exception) -> StartupError:
    return StartupError(f"{path} cannot be read: {error}")
