"""Commands to a running worker: what changes how steps are computed, or only looks at them."""

from __future__ import annotations

import gc
import logging
import time

from runtime.errors import HeadraceError
from runtime.executor.device_errors import raise_if_lost
from runtime.executor.profiler import Profiler
from runtime.executor.step_plan import MaskSource, StepPlan
from runtime.ipc.messages import (
    ControlReply,
    FreezeGarbage,
    SetLogLevel,
    SlowDown,
    StartProfile,
    StopProfile,
    WorkerCommand,
)
from runtime.scheduler.runner import Pending, Runner

logger = logging.getLogger(__name__)


class CommandedRunner:
    """One rank's runner, which can be slowed down and profiled while it serves."""

    def __init__(self, runner: Runner, profiler: Profiler) -> None:
        """Pass every step on to `runner`."""
        self._runner = runner
        self._profiler = profiler
        self._sleep_s = 0.0
        self._num_steps = 0

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> Pending:
        """Start computing a step."""
        self._num_steps += 1
        if self._sleep_s:
            time.sleep(self._sleep_s)
        if self._profiler.is_waiting:
            with self._profiler.step(plan, self._num_steps):
                return self._runner.launch(plan, masks)
        return self._runner.launch(plan, masks)

    def obey(self, command: WorkerCommand) -> ControlReply:
        """Do what `command` says; a failure is an answer, never the end of the worker.

        Raises:
            DeviceLost: the device has failed for good.
        """
        try:
            return ControlReply(command.call_id, True, self._do(command))
        except HeadraceError as error:
            return ControlReply(command.call_id, False, error.message)
        except Exception as error:
            raise_if_lost(error)
            logger.exception("A command of kind %s failed", type(command).__name__)
            return ControlReply(command.call_id, False, f"{type(error).__name__}: {error}")

    def _do(self, command: WorkerCommand) -> str:
        match command:
            case StartProfile():
                self._profiler.start(command.spec)
                return "The profile is on."
            case StopProfile():
                return f"Written to {self._profiler.stop()}"
            case SlowDown():
                self._sleep_s = command.seconds
            case FreezeGarbage():
                gc.collect()
                gc.freeze()
            case SetLogLevel():
                logging.getLogger().setLevel(command.level.upper())
        return ""
