"""Stand-ins for CUDA graphs: the same static buffers, the work done by calling it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class EagerGraph:
    """In the place of `capture_graph`."""

    def __init__(self, work: Callable[[], None], pool: Any) -> None:
        work()
        self.replay = work


class PlainBuffers:
    """In the place of `HostBuffers`, without pinned memory."""

    def __init__(self, size: int) -> None:
        self._size = size

    def next(self) -> torch.Tensor:
        return torch.empty(self._size, dtype=torch.int64)
