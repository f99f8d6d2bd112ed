"""Shows the progress of the start: bars on a terminal, else a log line from time to time."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from runtime.processes.status import EngineStatus

logger = logging.getLogger(__name__)

_PHASES = {
    "importing": "Starting the worker",
    "loading_weights": "Loading weights",
    "allocating_cache": "Allocating the KV pool",
    "warming_up": "Warming up",
}
# Phases that may be so long that their progress is shown.
_WITH_BAR = frozenset({"loading_weights", "warming_up"})


class ProgressLog:
    """Logs each phase of the engine's start, and draws bars for long phases on a terminal.

    When the engine is ready, a last line lists the seconds that each phase took.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin before the first phase.

        Args:
            stream: where bars are drawn if it is a terminal; by default standard error.
            every_s: without a terminal, seconds after which a phase is logged again.
            clock: returns the time in seconds.
        """
        self._every_s = every_s
        self._clock = clock
        self._stream = sys.stderr if stream is None else stream
        self._has_terminal = self._stream.isatty()
        self._phase = ""
        self._began = clock()
        self._seconds: dict[str, float] = {}
        self._said_at = 0.0
        self._bar: Any = None

    def __call__(self, status: EngineStatus) -> None:
        """Show the engine's status; called at each of its changes."""
        text = _PHASES.get(status.phase)
        is_new = status.phase != self._phase
        if is_new:
            self._close_bar()
            self._enter(status.phase)
        if text is None:
            return
        if is_new:
            self._say(text, status)
        if status.phase in _WITH_BAR and self._has_terminal:
            self._draw(text, status.fraction)
        elif self._clock() - self._said_at > self._every_s:
            self._say(text, status)

    def _enter(self, phase: str) -> None:
        now = self._clock()
        if self._phase in _PHASES:
            self._seconds[self._phase] = now - self._began
        self._phase, self._began = phase, now
        if phase == "ready" and self._seconds:
            parts = (f"{_PHASES[name].lower()} {took:.1f}" for name, took in self._seconds.items())
            logger.info("Seconds of the start: %s", ", ".join(parts).replace("kv", "KV"))
            self._seconds.clear()

    def _say(self, text: str, status: EngineStatus) -> None:
        self._said_at = self._clock()
        share = f" {100 * status.fraction:.0f}%" if status.fraction else ""
        detail = f" ({status.detail})" if status.detail else ""
        logger.info("%s%s%s", text, share, detail)

    def _draw(self, text: str, fraction: float) -> None:
        if self._bar is None:
            from tqdm import tqdm

            form = "{desc}: {percentage:3.0f}%|{bar:30}| {elapsed}"
            # With this delay, no bar is drawn for a short phase.
            self._bar = tqdm(
                total=1.0, desc=text, bar_format=form, file=self._stream, delay=0.3, leave=False
            )
        self._bar.update(fraction - self._bar.n)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
