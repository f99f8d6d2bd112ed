"""Executes commands that change or observe how a running worker computes steps."""

from __future__ import annotations

import gc
import logging

from runtime.errors import HeadraceError, InvalidRequest
from runtime.executor.device_errors import raise_if_lost
from runtime.executor.model_runner import StepRunner
from runtime.executor.profiler import Profiler
from runtime.ipc.messages import (
    ControlReply,
    FreezeGarbage,
    RecordExperts,
    SetLogLevel,
    SlowDown,
    StartProfile,
    StopProfile,
    WorkerCommand,
)

logger = logging.getLogger(__name__)


class Commands:
    """Executes commands on one rank, for example to record a profile or to set the log level."""

    def __init__(self, runner: StepRunner, profiler: Profiler) -> None:
        """Execute commands about `runner`; `profiler` records its steps."""
        self._runner = runner
        self._profiler = runner.profiler = profiler

    def execute(self, command: WorkerCommand) -> ControlReply:
        """Execute a command. An error becomes an error reply and does not end the worker.

        Raises:
            DeviceLost: the device no longer works.
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
            case RecordExperts():
                return self._record(command.action)
            case SlowDown():
                self._runner.delay_s = command.seconds
            case FreezeGarbage():
                gc.collect()
                gc.freeze()
            case SetLogLevel():
                logging.getLogger().setLevel(command.level.upper())
        return ""

    def _record(self, action: str) -> str:
        recorder = self._runner.recorder
        if recorder is None:
            raise InvalidRequest(
                "Expert use is not recorded by this server: start it with "
                "--expert-distribution-recorder-mode."
            )
        if action == "dump":
            path = recorder.dump()
            return "" if path is None else f"Written to {path}"
        if action == "start":
            recorder.start()
            return "Recording of expert use has started."
        recorder.stop()
        return "Recording of expert use has stopped."
