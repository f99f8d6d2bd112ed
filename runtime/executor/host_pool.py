"""One rank's host memory for evicted pages, and the copies between it and the device."""

from __future__ import annotations

import logging
import sys
import weakref
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.page_copy import copy_pages
from runtime.config.options import WorkerConfig
from runtime.errors import DeviceLost, StartupError
from runtime.executor.kv_pool import zeros
from runtime.executor.memory import GIB, PoolSize, available_memory_bytes
from runtime.executor.staging import to_device
from runtime.models.attention.forward_batch import KVCache
from runtime.step.step_plan import HostCopies, HostRun

logger = logging.getLogger(__name__)

# Share of the free memory that host pages may take.
_MOST_OF_FREE = 0.9


class HostPool:
    """Pages in host memory, and the stream on which a GPU copies them while steps run.

    A pool may hold slots of recurrent states instead; they are called pages here too.
    """

    def __init__(
        self, num_pages: int, kv: list[KVCache], device: torch.device, *, of_states: bool = False
    ) -> None:
        """Allocate the memory; for a GPU, all of it is page-locked at once.

        Args:
            num_pages: host pages; one more is allocated, because their numbers begin with 1.
            kv: the pool's tensors, which may be allocated anew between steps.
            device: the pool's device.
            of_states: whether slots of recurrent states are copied, and not pages.

        Raises:
            MemoryError: there is too little memory.
        """
        self._kv = kv
        self._of_states = of_states
        self._device = device
        row = sum(part[0].nbytes for part in self._parts())
        self._memory = zeros((num_pages + 1, row), torch.uint8, torch.device("cpu"))
        self._stream: torch.cuda.Stream | None = None
        # Events of copies that may still run, by their ticket.
        self._running: dict[int, torch.cuda.Event] = {}
        self._done = 0
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            size = self._memory.nbytes
            start = self._memory.data_ptr()
            if int(torch.cuda.cudart().cudaHostRegister(start, size, 0)):
                raise MemoryError(f"{size} bytes of host memory cannot be locked")
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, start)

    def _parts(self) -> list[Tensor]:
        """Return the tensors whose pages are copied, each once."""
        kinds = (layer.states if self._of_states else (layer.k, layer.v) for layer in self._kv)
        tensors = [each for tensors in kinds for each in tensors if each.numel()]
        return list({each.data_ptr(): each for each in tensors}.values())

    def page_bytes(self, host_page: int) -> memoryview:
        """Return the bytes of a host page, as a writable view."""
        return self._memory[host_page].numpy().data

    def last_done(self) -> int:
        """Return the ticket up to which all copies are done.

        On a CPU, copies end at once, and the result is the largest integer.
        """
        if self._stream is None:
            return sys.maxsize
        while self._running and (oldest := next(iter(self._running.items())))[1].query():
            self._done = oldest[0]
            del self._running[self._done]
        return self._done

    def copy(self, copies: HostCopies) -> None:
        """Start the copies of a step, and make the step wait for those that it needs.

        Raises:
            DeviceLost: a copy failed, so pages do not hold what the planner expects.
        """
        try:
            self._copy(copies)
        except Exception as error:
            raise DeviceLost(f"A copy between pages and host memory failed: {error}") from error

    def _copy(self, copies: HostCopies) -> None:
        first, beside = copies.split()
        if self._stream is None:
            self._start(first + beside)
            return
        current = torch.cuda.current_stream(self._device)
        for ticket, event in self._running.items():
            if ticket <= copies.needed:
                current.wait_event(event)
        self._start(first)
        used = current
        if beside:
            # Earlier steps may still write pages that are saved, or read pages that are
            # overwritten.
            used = self._stream
            used.wait_stream(current)
            with torch.cuda.stream(used):
                self._start(beside)
        self._running[copies.ticket] = used.record_event()

    def _start(self, runs: list[HostRun]) -> None:
        parts = self._parts()
        for run in runs:
            places = run.pages.astype(np.int64), run.host_pages.astype(np.int64)
            pages, host_pages = to_device(self._device, *places)
            copy_pages(parts, pages, self._memory, host_pages, to_host=run.to_host)


class HostPools(NamedTuple):
    """A rank's host memory for pages and for recurrent states.

    A field is `None` if the rank has no such memory.
    """

    pages: HostPool | None = None
    states: HostPool | None = None


def host_pools(
    config: WorkerConfig, size: PoolSize, kv: list[KVCache], device: torch.device
) -> HostPools:
    """Allocate host memory for pages and recurrent states, if the options enable it.

    Raises:
        StartupError: it does not fit; the message is one line.
    """
    num_pages, num_slots = num_host_pages(config, size), num_host_slots(config, size)
    if not num_pages:
        return HostPools()
    needed = size.size_bytes // size.num_pages * (num_pages + 1)
    slot = sum(part[0].nbytes for layer in kv for part in layer.states)
    needed += slot * (num_slots + 1) if num_slots else 0
    # The operating system counts a CPU's pool only once it is written.
    pool_bytes = size.size_bytes if device.type == "cpu" else 0
    free = available_memory_bytes() // (config.num_local_ranks * config.dp_size) - pool_bytes
    if needed > free * _MOST_OF_FREE:
        raise StartupError(
            f"--hicache-ratio {config.host_pool_ratio:g} needs {needed / GIB:.1f} GiB of host "
            f"memory but only {max(free, 0) / GIB:.1f} GiB are free; lower it, or "
            "--max-total-tokens."
        )
    logger.info(
        "Host memory for the prefix cache: %d tokens = %d pages, %d slots of states, %.2f GiB of "
        "%.2f GiB free",
        num_pages * size.page_size,
        num_pages,
        num_slots,
        needed / GIB,
        free / GIB,
    )
    states = HostPool(num_slots, kv, device, of_states=True) if num_slots else None
    return HostPools(HostPool(num_pages, kv, device), states)


def num_host_pages(config: WorkerConfig, size: PoolSize) -> int:
    """Return the number of pages in host memory, the same on every rank."""
    return int(size.num_pages * config.host_pool_ratio)


def num_host_slots(config: WorkerConfig, size: PoolSize) -> int:
    """Return the number of slots of recurrent states in host memory, the same on every rank."""
    return int(size.num_state_slots * config.host_pool_ratio)
