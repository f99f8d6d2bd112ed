"""Computes how many pages of the KV cache fit into memory, and logs the computation."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.errors import StartupError

logger = logging.getLogger(__name__)

# The KV cache's share of the memory that is free after the weights are loaded. Activations and
# other uses get the rest.
CPU_SHARE_FOR_KV = 0.4
# Share of a GPU's memory for weights, activations and KV cache. CUDA graphs and libraries get the
# rest.
CUDA_FRACTION = 0.9
GIB = 1 << 30

_CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class PoolSize:
    """The size of the KV pool.

    Attributes:
        num_pages: number of pages.
        page_size: number of tokens per page.
        size_bytes: memory of all pages.
        num_state_slots: number of slots of recurrent states.
        num_window_pages: number of pages for sliding-window layers; 0 if every page belongs to all
            layers.
    """

    num_pages: int
    page_size: int
    size_bytes: int
    num_state_slots: int = 0
    num_window_pages: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the pool can hold."""
        return self.num_pages * self.page_size


def available_memory_bytes(*, with_swap: bool = False, control_group: Path = _CONTROL_GROUP) -> int:
    """Return the memory that this process may still use, in bytes.

    This is the machine's free memory, or the free memory of the process's control group if that is
    less. With `with_swap`, free swap space counts as well.
    """
    available = 0
    counted = ("MemAvailable:", "SwapFree:") if with_swap else ("MemAvailable:",)
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(counted):
            available += int(line.split()[1]) * 1024
    try:
        limit = (control_group / "memory.max").read_text(encoding="ascii").strip()
        used = (control_group / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return available
    if limit == "max":
        return available
    return min(available, int(limit) - max(0, int(used) - _reclaimable_bytes(control_group)))


def _reclaimable_bytes(control_group: Path) -> int:
    """Return the bytes of cached file pages in a control group, such as pages of checkpoint files.

    The kernel frees these pages when memory is needed. `MemAvailable` counts them as available.
    """
    try:
        lines = (control_group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return sum(int(counts.get(name, 0)) for name in ("inactive_file", "active_file"))


@dataclass(frozen=True)
class Budget:
    """Memory for the KV pool.

    Attributes:
        size_bytes: memory that the pool may take; negative if the other uses need too much.
        available_bytes: free memory of the device.
        arithmetic: how `size_bytes` was computed, in GiB, for the log.
    """

    size_bytes: int
    available_bytes: int
    arithmetic: str

    def without(self, size_bytes: int, what: str) -> Budget:
        """Return this budget minus `size_bytes` for another use, which the log names `what`."""
        left = self.size_bytes - size_bytes
        arithmetic = f"{self.arithmetic} - {size_bytes / GIB:.2f} for {what} = {left / GIB:.2f}"
        return Budget(left, self.available_bytes, arithmetic)

    def limited(self, size_bytes: int, available_bytes: int) -> Budget:
        """Return this budget, reduced to the smallest budget of all ranks.

        Args:
            size_bytes: the smallest budget of all ranks.
            available_bytes: the smallest free memory of all ranks.
        """
        arithmetic = self.arithmetic
        # The log's figures do not show a smaller difference.
        if self.size_bytes - size_bytes >= GIB // 100:
            arithmetic += f" on this rank; {size_bytes / GIB:.2f} on the rank with the least"
        return Budget(size_bytes, available_bytes, arithmetic)


def cpu_budget(
    fraction: float | None,
    weight_bytes: int,
    num_ranks: int = 1,
    *,
    unloaded_bytes: int = 0,
    available_bytes: int | None = None,
) -> Budget:
    """Return the memory budget of the KV pool on a CPU.

    Args:
        fraction: share of the memory for weights and pool together; `None` for the default, a share
            of the memory that is left after the weights.
        weight_bytes: memory of this rank's weights.
        num_ranks: number of processes that share the memory evenly.
        unloaded_bytes: the part of `weight_bytes` that is not allocated yet, for a forecast.
        available_bytes: free memory of the machine; `None` measures it.
    """
    if available_bytes is None:
        available_bytes = available_memory_bytes()
    available = available_bytes // num_ranks - unloaded_bytes
    free = f"{available / GIB:.2f} free"
    if num_ranks > 1:
        free += f", 1/{num_ranks} of the machine's"
    if fraction is None:
        size = int(available * CPU_SHARE_FOR_KV)
        return Budget(size, available, f"({free}) x {CPU_SHARE_FOR_KV} = {size / GIB:.2f}")
    size = int((available + weight_bytes) * fraction) - weight_bytes
    weights = f"{weight_bytes / GIB:.2f} of weights"
    arithmetic = f"({free} + {weights}) x {fraction:g} - {weights} = {size / GIB:.2f}"
    return Budget(size, available, arithmetic)


def cuda_budget(
    fraction: float | None, weight_bytes: int, activation_bytes: int, *, unloaded_bytes: int = 0
) -> Budget:
    """Return the memory budget of the KV pool on the current GPU.

    Args:
        fraction: share of the GPU's memory for weights, pool and activations together.
        weight_bytes: memory of the weights; only for the log.
        activation_bytes: measured memory that the largest step needs besides weights and pool.
        unloaded_bytes: the part of `weight_bytes` that is not allocated yet, for a forecast.
    """
    free, total = torch.cuda.mem_get_info()
    free -= unloaded_bytes
    share = CUDA_FRACTION if fraction is None else fraction
    size = free - int(total * (1.0 - share)) - activation_bytes
    arithmetic = (
        f"{total / GIB:.1f} of the GPU x {share:g} - {(total - free) / GIB:.1f} in use "
        f"({weight_bytes / GIB:.1f} of weights) - {activation_bytes / GIB:.1f} for the largest "
        f"step = {size / GIB:.1f}"
    )
    return Budget(size, free, arithmetic)


def size_pool(
    per_token: int,
    *,
    page_size: int,
    max_total_tokens: int | None,
    max_running_requests: int,
    context_len: int,
    budget: Budget,
) -> PoolSize:
    """Choose the number of pages of the KV pool, and log why.

    Args:
        per_token: bytes that a token takes in the pool.
        page_size: number of tokens per page.
        max_total_tokens: the user's size of the pool; `None` for as much as is useful and fits.
        max_running_requests: maximum number of running requests. The pool needs no more room than
            for this many requests of length `context_len`.
        context_len: maximum number of tokens of a request.
        budget: memory that the pool may take.

    Raises:
        StartupError: not even one page fits, or the tokens that the user requested do not fit.
    """
    available = budget.available_bytes
    fits = budget.size_bytes // per_token
    useful = max_running_requests * context_len
    if max_total_tokens is not None:
        if max_total_tokens > max(fits, int(available * 0.9) // per_token):
            raise StartupError(
                f"--max-total-tokens {max_total_tokens} needs "
                f"{max_total_tokens * per_token / GIB:.1f} GiB but only {available / GIB:.1f} GiB "
                "are free; lower it."
            )
        wanted, why = max_total_tokens, "--max-total-tokens"
    elif fits < useful:
        wanted, why = fits, "limited by memory"
    else:
        wanted, why = useful, "every running request at full length"
    num_pages = wanted // page_size
    if num_pages < 1 and max_total_tokens is not None:
        raise StartupError(
            f"--max-total-tokens {max_total_tokens} is less than one page of {page_size} tokens."
        )
    if num_pages < 1:
        raise StartupError(
            f"No memory is left for the KV pool, of {per_token} bytes a token (GiB: "
            f"{budget.arithmetic}); raise --mem-fraction-static, lower --chunked-prefill-size and "
            "--max-running-requests, share the model with --tp-size, or free memory."
        )
    size = PoolSize(num_pages, page_size, num_pages * page_size * per_token)
    logger.info("Memory for the KV pool, GiB: %s", budget.arithmetic)
    logger.info(
        "KV pool: %d tokens = %d pages of %d; %d bytes a token, %.2f GiB of %.2f GiB free (%s)",
        size.num_tokens,
        num_pages,
        page_size,
        per_token,
        size.size_bytes / GIB,
        available / GIB,
        why,
    )
    return size
