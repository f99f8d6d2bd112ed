"""Feeds training: worker processes draw rows, and batches are sampled from a pool on the device.

Workers write blocks of rows into shared memory. A thread copies them into the pool, a ring in which
every new row replaces the oldest. Training never waits: if workers are slower, rows are used more
than once.
"""

import mmap
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from multiprocessing.queues import SimpleQueue
from random import Random

import numpy as np
import torch
from torch import Tensor

from recipes.demo_vision.network import Batch
from recipes.demo_vision.rows import Layout, Row, RowWriter
from recipes.demo_vision.shape import vision_tokenizer

SampleWriter = Callable[[Random, RowWriter, Row], None]
BLOCK_ROWS = 32
_END = -1


def _torch(dtype: "np.dtype[np.generic]") -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.name)
    return found


class SharedBlocks:
    """Blocks of rows in memory that parent and forked children share."""

    def __init__(self, layout: Layout, count: int) -> None:
        self.fields = layout.fields()
        self._offsets: dict[str, int] = {}
        size = 0
        for name, (shape, dtype) in self.fields.items():
            self._offsets[name] = size
            size += BLOCK_ROWS * int(np.prod(shape)) * np.dtype(dtype).itemsize
            size = -(-size // 64) * 64
        self._stride = size
        self._memory = mmap.mmap(-1, count * size)
        self.count = count

    def block(self, index: int) -> Row:
        """The arrays of one block, `[BLOCK_ROWS, ...]` each."""
        return {
            name: np.ndarray(
                (BLOCK_ROWS, *shape),
                dtype,
                self._memory,
                index * self._stride + self._offsets[name],
            )
            for name, (shape, dtype) in self.fields.items()
        }


def _work(
    blocks: SharedBlocks,
    queues: "tuple[SimpleQueue[int], SimpleQueue[int]]",
    writer: RowWriter,
    sample: SampleWriter,
    seed: int,
) -> None:
    """The worker process: fill free blocks as long as the parent lives."""
    # Each worker has one core, and a lower priority than the thread that feeds the device.
    os.nice(5)
    free, full = queues
    rng = Random(seed)
    while True:
        index = free.get()
        if index == _END:
            break
        block = blocks.block(index)
        for number in range(BLOCK_ROWS):
            sample(rng, writer, {name: array[number] for name, array in block.items()})
        full.put(index)
    full.put(_END)


class Pool:
    """The newest rows of one layout, on the device.

    Attributes:
        made: number of rows received.
    """

    def __init__(
        self, layout: Layout, sample: SampleWriter, workers: int, seed: int, window: int
    ) -> None:
        """Start the workers, which are forked, so call this before anything uses a GPU."""
        self._layout = layout
        context = multiprocessing.get_context("fork")
        self._blocks = SharedBlocks(layout, 4 * workers)
        self._free: SimpleQueue[int] = context.SimpleQueue()
        self._full: SimpleQueue[int] = context.SimpleQueue()
        for index in range(self._blocks.count):
            self._free.put(index)
        writer = RowWriter(vision_tokenizer(), layout, window)
        self._workers: list[ForkProcess] = []
        for number in range(workers):
            arguments = (
                self._blocks, (self._free, self._full), writer, sample, seed * 1000 + number,
            )  # fmt: skip
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self._workers.append(process)
        self.made = 0
        self._rng = np.random.default_rng(seed)
        self._stop = threading.Event()

    def open(self, capacity: int, device: str) -> None:
        """Allocate `capacity` rows on the device and begin to fill them."""
        self._capacity = max(8, capacity // BLOCK_ROWS) * BLOCK_ROWS
        self._device = device
        self._rows: Batch = {
            name: torch.zeros((self._capacity, *shape), dtype=getattr(torch, dtype), device=device)
            for name, (shape, dtype) in self._layout.fields().items()
        }
        # Gathering four bytes is as fast as gathering one.
        self._rows["pixels"] = self._rows["pixels"].view(torch.int32)
        if device == "cuda":
            torch.cuda.synchronize()
        self._thread = threading.Thread(target=self._fill, daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        cuda = self._device == "cuda"
        staging: Batch = {
            name: torch.zeros((BLOCK_ROWS, *shape), dtype=getattr(torch, dtype), pin_memory=cuda)
            for name, (shape, dtype) in self._layout.fields().items()
        }
        staging["pixels"] = staging["pixels"].view(torch.int32)
        stream = torch.cuda.Stream() if cuda else None
        running = len(self._workers)
        while running:
            index = self._full.get()
            if index == _END or self._stop.is_set():
                running -= index == _END
                continue
            for name, array in self._blocks.block(index).items():
                staging[name].view(_torch(array.dtype)).copy_(torch.from_numpy(array))
            self._free.put(index)
            begin = self.made % self._capacity
            with torch.cuda.stream(stream):
                for name, tensor in staging.items():
                    self._rows[name][begin : begin + BLOCK_ROWS].copy_(tensor, non_blocking=cuda)
            if stream is not None:
                stream.synchronize()
            self.made += BLOCK_ROWS

    def wait(self, rows: int) -> None:
        """Wait until at least `rows` rows are available."""
        while self.made < rows:
            dead = [process.exitcode for process in self._workers if not process.is_alive()]
            if dead or not self._thread.is_alive():
                raise RuntimeError(f"no more rows come in; exit codes of workers: {dead}")
            time.sleep(0.05)

    def batch(self, rows: int) -> Batch:
        """Randomly chosen rows, on the device."""
        made = self.made
        if made <= self._capacity:
            chosen = self._rng.integers(0, min(made, self._capacity), rows)
        else:
            # Exclude the oldest rows: they may be overwritten while the device still reads them.
            guard = self._capacity // 8
            offset = self._rng.integers(guard, self._capacity, rows)
            chosen = (made + offset) % self._capacity
        index = torch.from_numpy(chosen)
        if self._device == "cuda":
            index = index.pin_memory().to(self._device, non_blocking=True)
        found = {name: tensor.index_select(0, index) for name, tensor in self._rows.items()}
        found["pixels"] = found["pixels"].view(torch.uint8)
        return found

    def close(self) -> None:
        """Stop the workers; they finish their current blocks."""
        self._stop.set()
        for _ in self._workers:
            self._free.put(_END)
        for process in self._workers:
            process.join(20)
            process.terminate()


def to_batch(rows: list[Row], device: str) -> Batch:
    """Rows stacked, on the device."""
    found: dict[str, Tensor] = {}
    for name in rows[0]:
        found[name] = torch.from_numpy(np.stack([row[name] for row in rows])).to(device)
    return found
