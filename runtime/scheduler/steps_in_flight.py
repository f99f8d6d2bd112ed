"""Keeps the steps that were launched and whose results are not read yet."""

from __future__ import annotations

from collections import deque

from runtime.scheduler.planner import PlannedStep
from runtime.step.executor import Pending
from runtime.step.step_plan import StepResult


class StepsInFlight:
    """A queue of steps, oldest first. Results are read in the order of the launches.

    Attributes:
        is_staged: whether the model has several pipeline stages. If so, the stages compute
            different steps at the same time, and the last stage begins a step only when its result
            is awaited.
    """

    def __init__(self, *, overlap: bool, num_stages: int) -> None:
        """Keep as many steps in flight as there are stages; with `overlap`, two."""
        self.is_staged = num_stages > 1
        # Steps that stay in flight while the next one is planned.
        self._num_ahead = num_stages - 1 if self.is_staged else int(overlap)
        self._num_retractions = 0
        self._steps: deque[tuple[PlannedStep, Pending]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, planned: PlannedStep, pending: Pending) -> None:
        """Add a step that was launched."""
        self._steps.append((planned, pending))

    def finish(self) -> tuple[PlannedStep, StepResult]:
        """Wait for the oldest step, which leaves the queue even if it fails."""
        planned, pending = self._steps.popleft()
        return planned, pending.wait()

    def num_kept(self, num_retractions: int, is_launched: bool) -> int:
        """Return how many of the steps in flight may stay in flight when the next step is planned.

        Args:
            num_retractions: how often requests were retracted so far. The tokens of a retracted
                request must be known before it is admitted again. So a step may stay in flight only
                if it was planned after the last retraction.
            is_launched: whether a step was launched in this iteration of the loop. If not, one more
                result is read, because it may let further requests be planned.
        """
        has_retracted = num_retractions > self._num_retractions
        self._num_retractions = num_retractions
        num_before = len(self._steps) - is_launched
        if has_retracted:
            num_before = 0
        elif not is_launched:
            return max(num_before - 1, 0)
        newest = self._steps[-1][0] if is_launched else None
        if not self.is_staged and newest is not None and newest.masks is not None:
            # The next masks depend on this step's tokens.
            return 0
        return min(num_before + is_launched, self._num_ahead)

    def discard(self) -> None:
        """Drop all steps without reading their results, after a failure that ends every request."""
        while self._steps:
            _, pending = self._steps.popleft()
            if self.is_staged:
                # The other stages have sent what they computed, and it must be received.
                pending.wait()
