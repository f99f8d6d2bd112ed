"""Rank 0's runner of a model whose layers are cut into stages."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from runtime.step.executor import Pending, Runner
from runtime.step.step_plan import Int32Array, MaskSource, StepPlan, StepResult, TokenMasks
from runtime.worker.ranks import PlanSender


class StagedRunner:
    """Sends each plan to the other stages at once, and computes its own, the last, in `wait`.

    So the stages before compute a step while this one computes an earlier step. Steps must be
    waited for in the order of their launches. A row may only decode in a step that is launched
    after the row's last token is known: the plan brings it to the first stage.
    """

    def __init__(self, runner: Runner, ranks: PlanSender) -> None:
        """Wrap rank 0's own runner."""
        self._runner = runner
        self._ranks = ranks
        # The last token of each row.
        self._last: Int32Array = np.zeros(0, dtype=np.int32)

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> Pending:
        """Start computing a step on the other stages.

        Masks are made at once, while what they depend on is as the step was planned.
        """
        made = None if masks is None else masks.make()
        decoding = plan.rows[: plan.num_decodes]
        self._ranks.send(replace(plan, decode_tokens=self._last[decoding]))
        return _StagedStep(self, plan, made)

    def finish(self, plan: StepPlan, masks: TokenMasks | None) -> StepResult:
        """Compute the last stage of the earliest step that is not finished."""
        try:
            result = self._runner.launch(plan, masks).wait()
        except Exception as error:
            # The other ranks have computed the step, and nothing can synchronize them again.
            self._ranks.give_up(f"A step of {len(plan.rows)} sequences failed on rank 0.", error)
        rows = plan.sample_rows
        if len(rows):
            most = int(rows.max()) + 1
            if len(self._last) < most:
                self._last = np.pad(self._last, (0, most - len(self._last)))
            # A row whose logits were NaN ends, and has no token.
            self._last[rows] = np.maximum(result.token_ids, 0)
        return result


class _StagedStep:
    """A step that the other stages compute."""

    def __init__(self, runner: StagedRunner, plan: StepPlan, masks: TokenMasks | None) -> None:
        self._runner, self._plan, self._masks = runner, plan, masks

    def wait(self) -> StepResult:
        """Compute the last stage."""
        return self._runner.finish(self._plan, self._masks)
