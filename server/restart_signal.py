"""Replaces the workers on SIGUSR2, as `/restart_worker` does; running streams go on."""

from __future__ import annotations

import asyncio
import logging
import signal

from runtime.service.context import ServiceContext

logger = logging.getLogger(__name__)


async def follow_restart_signal(context: ServiceContext) -> None:
    """Replace the workers on each SIGUSR2, until cancelled.

    Several signals during one replacement cause only one more.
    """
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, asked.set)
    while True:
        await asked.wait()
        asked.clear()
        logger.info("SIGUSR2: replacing the worker; its streams go on in the next one.")
        outcome = await context.weights.restart_workers()
        if outcome.success:
            logger.info("%s", outcome.message)
        else:
            logger.error("%s", outcome.message)
