"""Responses that are made while nobody waits for them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from runtime.errors import HeadraceError

if TYPE_CHECKING:
    # It knows the context that holds these.
    from openai_api.responses.response_run import ResponseRun

logger = logging.getLogger(__name__)


class BackgroundResponses:
    """Those that run; each is in the store, too, where it is asked for."""

    def __init__(self) -> None:
        """Begin with none."""
        self._running: dict[str, tuple[ResponseRun, asyncio.Task[None]]] = {}

    async def start(self, run: ResponseRun) -> None:
        """Let `run` go on by itself."""
        await run.keep()
        task = asyncio.create_task(self._finish(run))
        self._running[run.id] = (run, task)

    def running(self, response_id: str) -> dict[str, Any] | None:
        """A response as it stands; None where it does not run."""
        run, _ = self._running.get(response_id, (None, None))
        return None if run is None else run.response

    async def cancel(self, response_id: str) -> bool:
        """End a response; whether it still ran."""
        run, task = self._running.pop(response_id, (None, None))
        if run is None or task is None:
            return False
        task.cancel()
        await asyncio.wait([task])
        await run.cancel()
        return True

    async def _finish(self, run: ResponseRun) -> None:
        try:
            await run.whole()
        except Exception as error:
            if not isinstance(error, HeadraceError):
                logger.exception("A response in the background failed")
            await run.fail(error)
        finally:
            self._running.pop(run.id, None)
