"""What computes the scheduler's steps: the executor, or what stands before it."""

from __future__ import annotations

from typing import Protocol

from runtime.executor.step_plan import MaskSource, StepPlan, StepResult


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
