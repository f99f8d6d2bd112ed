"""Runs several tasks on one event loop that take their work from the same queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


async def run_workers(work: Callable[[], Coroutine[Any, Any, None]], num_workers: int) -> None:
    """Run `num_workers` tasks of `work` at the same time; the first failure cancels the others."""
    tasks = [asyncio.create_task(work()) for _ in range(num_workers)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
