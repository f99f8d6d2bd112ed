"""Interfaces through which the scheduler computes steps and changes weights."""

from __future__ import annotations

from typing import Protocol

from runtime.ipc.messages import ControlReply, WorkerCommand
from runtime.ipc.weight_messages import WeightCall
from runtime.step.step_plan import MaskSource, StepPlan, StepResult


class Pending(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are known."""
        ...


class Runner(Protocol):
    """The interface of the executor that the scheduler uses."""

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> Pending:
        """Start computing a step; `masks` covers its constrained samples."""
        ...


class WeightHandler(Protocol):
    """The interface through which the scheduler changes weights and releases memory."""

    @property
    def can_compute(self) -> bool:
        """Whether the memory of weights and KV pool is allocated."""
        ...

    def handle(self, call: WeightCall) -> ControlReply:
        """Execute `call`; call this only while no step is in flight."""
        ...


def refuse_command(command: WorkerCommand) -> ControlReply:
    """Answer a command where nothing executes commands."""
    return ControlReply(command.call_id, False, "This worker takes no commands.")
