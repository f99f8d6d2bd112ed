"""Several workers that share one queue of work, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def run_workers(work: Callable[[], Coroutine[Any, Any, None]], num_workers: int) -> None:
    """Run `work` `num_workers` times at once; the first failure or a cancellation ends all."""
    tasks = [asyncio.create_task(work()) for _ in range(num_workers)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
