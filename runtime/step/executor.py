"""What computes the scheduler's steps, and who changes its weights: executors, or their leads."""

from __future__ import annotations

from typing import Protocol

from runtime.ipc.messages import ControlReply
from runtime.ipc.weight_messages import WeightCall
from runtime.step.step_plan import MaskSource, StepPlan, StepResult


class Pending(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until its tokens are known."""
        ...


class Runner(Protocol):
    """What the scheduler needs of the executor."""

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> Pending:
        """Start computing a step, with the masks of those of its samples that have a grammar."""
        ...


class WeightHandler(Protocol):
    """What the scheduler needs of those who change weights and give memory back."""

    @property
    def can_compute(self) -> bool:
        """Whether weights and KV pool have their memory."""
        ...

    def handle(self, call: WeightCall) -> ControlReply:
        """Do what `call` says; no step is in flight."""
        ...
