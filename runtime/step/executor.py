"""Interfaces through which the scheduler launches steps and changes weights."""

from __future__ import annotations

from typing import Protocol

from runtime.ipc.messages import ControlReply, WorkerCommand
from runtime.ipc.weight_messages import WeightCall
from runtime.step.step_plan import MaskSource, StepPlan, StepResult


class Pending(Protocol):
    """A launched step whose result may not be known yet."""

    def wait(self) -> StepResult:
        """Wait until the step's tokens are known, and return the result."""
        ...


class Runner(Protocol):
    """Launches steps: the scheduler's interface to the executor."""

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> Pending:
        """Start to compute a step, and return before its result is known.

        Args:
            plan: the step's plan.
            masks: grammar masks for the step's samples; `None` if no sample is constrained.
        """
        ...


class WeightHandler(Protocol):
    """Changes weights and releases device memory, on request of the scheduler."""

    @property
    def can_compute(self) -> bool:
        """Whether the memory of weights and KV cache is allocated, so that steps are possible."""
        ...

    def handle(self, call: WeightCall) -> ControlReply:
        """Execute a call and return the reply; no step may be in flight."""
        ...


def refuse_command(command: WorkerCommand) -> ControlReply:
    """Return a failure reply to `command`, for a worker that cannot execute commands."""
    return ControlReply(command.call_id, False, "This worker takes no commands.")
