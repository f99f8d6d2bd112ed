"""How many pages fit: the arithmetic, and one line that shows it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.errors import StartupError

logger = logging.getLogger(__name__)

# Of the memory that is free once the weights are loaded; the rest is for activations and others.
CPU_SHARE_FOR_KV = 0.4
# Of a GPU's memory, for weights, activations and pool together; graphs and libraries take the rest.
CUDA_FRACTION = 0.9
GIB = 1 << 30


@dataclass(frozen=True)
class PoolSize:
    """The KV pool, `num_pages` of `page_size` tokens, and the bytes it takes."""

    num_pages: int
    page_size: int
    size_bytes: int

    @property
    def num_tokens(self) -> int:
        """Capacity in tokens."""
        return self.num_pages * self.page_size


def available_memory_bytes() -> int:
    """Memory this process may still take: the machine's, or its control group's if that is less."""
    available = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))


def cpu_budget(fraction: float | None, weight_bytes: int, num_ranks: int = 1) -> tuple[int, int]:
    """Bytes the pool may take on the CPU, and bytes that are free.

    Args:
        fraction: share of memory for weights and pool together, or `None`.
        weight_bytes: memory the weights take already.
        num_ranks: processes that share the memory evenly.
    """
    available = available_memory_bytes() // num_ranks
    if fraction is None:
        return int(available * CPU_SHARE_FOR_KV), available
    return int((available + weight_bytes) * fraction) - weight_bytes, available


def cuda_budget(fraction: float | None, activation_bytes: int) -> tuple[int, int]:
    """Bytes the pool may take on the current GPU, and bytes that are free.

    Args:
        fraction: share of the GPU's memory for weights, pool and activations together.
        activation_bytes: what the largest step needs besides weights and pool, measured.
    """
    free, total = torch.cuda.mem_get_info()
    kept = int(total * (1.0 - (CUDA_FRACTION if fraction is None else fraction)))
    return free - kept - activation_bytes, free


def size_pool(
    per_token: int,
    *,
    page_size: int,
    max_total_tokens: int | None,
    max_running_requests: int,
    context_len: int,
    budget: int,
    available: int,
) -> PoolSize:
    """Choose the number of pages and log why.

    Args:
        per_token: bytes that a token takes in the pool.
        page_size: tokens per page.
        max_total_tokens: the user's wish, or `None` for as much as is useful and fits.
        max_running_requests: more than all of them at full length is never needed.
        context_len: longest request, tokens.
        budget: bytes the pool may take.
        available: bytes that are free on the device.

    Raises:
        StartupError: not even one page fits, or less than the user asked for.
    """
    fits = budget // per_token
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
            f"No memory is left for the KV pool ({max(budget, 0) / GIB:.2f} GiB for "
            f"{per_token} bytes a token); raise --mem-fraction-static, or free memory."
        )
    size = PoolSize(num_pages, page_size, num_pages * page_size * per_token)
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
