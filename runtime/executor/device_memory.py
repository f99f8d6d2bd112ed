"""Releases and restores device memory while nothing runs: the KV cache and CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from runtime.executor.model_runner import StepRunner
from runtime.ipc.freed_memory import return_freed_memory
from runtime.models.attention.forward_batch import KVCache


class DeviceMemory:
    """The device memory of one rank, except the weights.

    Attributes:
        kv_is_released: whether the KV cache is released. If so, no step may run until `restore_kv`.
    """

    def __init__(
        self, runner: StepRunner, kv: list[KVCache], allocate: Callable[[], list[KVCache]]
    ) -> None:
        """Manage the memory of `runner`.

        Args:
            runner: launches the steps.
            kv: the KV cache, one entry per layer. The runner and its graphs use this list object.
            allocate: allocates the KV cache again.
        """
        self._runner = runner
        self._kv = kv
        self._allocate = allocate
        self._had_graphs = runner.has_graphs
        self.kv_is_released = False

    @property
    def graphs_are_missing(self) -> bool:
        """Whether CUDA graphs existed and were dropped."""
        return self._had_graphs and not self._runner.has_graphs

    def release_kv(self) -> None:
        """Release the KV cache and the vectors of images.

        The CUDA graphs are released too, because they contain addresses of the KV cache.
        """
        self._kv.clear()
        self.forget_recordings()
        self._runner.drop_images()
        self.kv_is_released = True
        self.release_graphs()

    def restore_kv(self) -> None:
        """Allocate the KV cache again; its pages are empty.

        Raises:
            MemoryError: there is too little memory; the KV cache stays released.
        """
        if not self.kv_is_released:
            return
        try:
            self._kv.extend(self._allocate())
        except torch.OutOfMemoryError as error:
            give_back()
            raise MemoryError("not enough memory for the KV pool") from error
        self.kv_is_released = False

    def forget_recordings(self) -> None:
        """Drop recorded steps, because weights may get other memory."""
        if self._runner.steps is not None:
            self._runner.steps.forget()

    def release_graphs(self) -> None:
        """Release the CUDA graphs; steps run without them."""
        self._runner.drop_graphs()

    def restore_graphs(self, beat: Callable[[], None]) -> None:
        """Capture the CUDA graphs again, if they were released.

        `beat` is called now and then, as a heartbeat of the process.
        """
        if self.graphs_are_missing:
            self._runner.capture_graphs(lambda _: beat())


def give_back() -> None:
    """Return memory that is no longer used to the device or to the operating system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return
    return_freed_memory()
