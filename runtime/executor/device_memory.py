"""Device memory that can be released while nothing runs: KV pages and CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from runtime.executor.model_runner import StepRunner
from runtime.ipc.freed_memory import return_freed_memory
from runtime.models.attention.forward_batch import KVCache


class DeviceMemory:
    """One rank's device memory besides the weights.

    Attributes:
        kv_is_released: whether the pages are released; then no step may run until `restore_kv`.
    """

    def __init__(
        self, runner: StepRunner, kv: list[KVCache], allocate: Callable[[], list[KVCache]]
    ) -> None:
        """Manage `kv`, the list that `runner` and its graphs share, allocated by `allocate`."""
        self._runner = runner
        self._kv = kv
        self._allocate = allocate
        self._had_graphs = runner.has_graphs
        self.kv_is_released = False

    @property
    def graphs_are_missing(self) -> bool:
        """Whether graphs existed and have been dropped."""
        return self._had_graphs and not self._runner.has_graphs

    def release_kv(self) -> None:
        """Release all pages and images, and the graphs, because they contain addresses of pages."""
        self._kv.clear()
        self._runner.drop_images()
        self.kv_is_released = True
        self.release_graphs()

    def restore_kv(self) -> None:
        """Allocate the memory of the pages again; the pages are empty.

        Raises:
            MemoryError: too little memory; the pages stay released.
        """
        if not self.kv_is_released:
            return
        try:
            self._kv.extend(self._allocate())
        except torch.OutOfMemoryError as error:
            give_back()
            raise MemoryError("not enough memory for the KV pool") from error
        self.kv_is_released = False

    def release_graphs(self) -> None:
        """Drop the CUDA graphs; steps run without them."""
        self._runner.drop_graphs()

    def restore_graphs(self, beat: Callable[[], None]) -> None:
        """Capture the graphs again, for the current addresses."""
        if self.graphs_are_missing:
            self._runner.capture_graphs(lambda _: beat())


def give_back() -> None:
    """Return freed memory to the device or to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return
    return_freed_memory()
