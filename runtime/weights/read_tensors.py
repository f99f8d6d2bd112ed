"""Tensors of a checked checkpoint: views of mapped files, or copies on a GPU made by threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.checkpoint.check import CheckpointSummary
from runtime.checkpoint.headers import TensorInfo
from runtime.errors import StartupError
from runtime.models.layers.parameter import WeightShard

# One thread moves 3 to 6 GB/s from the page cache to a GPU, several about three times as much.
_READERS = 4
# Copies that wait on the device for their turn; one tensor more may be on its way.
_AHEAD_BYTES = 2 * 2**30


def checkpoint_tensors(
    summary: CheckpointSummary, device: torch.device, shards: Mapping[str, WeightShard]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checked folder one by one, in the order of the bytes on disk.

    For the CPU they are views of the mapped file: use them before the next one, or copy. For a GPU
    several threads read and copy ahead, from as many shards as there are, and of each tensor only
    the part in `shards`.

    Raises:
        StartupError: a file changed since it was checked.
    """
    if device.type == "cpu":
        yield from _views(summary.tensors)
    else:
        yield from copies(summary.tensors, device, shards)


def _views(infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    for path, of_file in groupby(infos.items(), key=lambda item: item[1].file):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name, info in of_file:
                    yield name, file.get_tensor(info.name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error


def copies(
    infos: Mapping[str, TensorInfo], device: torch.device, shards: Mapping[str, WeightShard]
) -> Iterator[tuple[str, Tensor]]:
    """Yield copies on `device`, in the order of `infos`, made by several threads.

    Args:
        infos: what to read, by the name it is wanted under.
        device: where to.
        shards: by name, which part of a tensor is wanted; others are copied whole.

    Raises:
        StartupError: a file cannot be read.
    """
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for path in dict.fromkeys(info.file for info in infos.values()):
            try:
                files[path] = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error

        # Making a view takes no time, and the library does not say that threads may share a file.
        one_by_one = threading.Lock()

        def read(name: str, info: TensorInfo) -> Tensor:
            try:
                with one_by_one:
                    view: Tensor = files[info.file].get_tensor(info.name)
            except (SafetensorError, OSError) as error:
                raise _unreadable(info.file, error) from error
            if name in shards:
                view = shards[name].local_part(view)
            return view.to(device, copy=True)

        pool = stack.enter_context(ThreadPoolExecutor(_READERS, thread_name_prefix="weights"))
        waiting: deque[tuple[str, int, Future[Tensor]]] = deque()
        ahead = 0
        try:
            for name, info in infos.items():
                while waiting and ahead + info.size_bytes > _AHEAD_BYTES:
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
