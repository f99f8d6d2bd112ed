"""Launches steps of a model whose layers are divided into pipeline stages."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from runtime.step.executor import Pending, Runner
from runtime.step.step_plan import Int32Array, MaskSource, StepPlan, StepResult, TokenMasks
from runtime.worker.ranks import PlanSender


class StagedRunner:
    """Sends each plan to the other stages at once, and computes its own stage, the last, in `wait`.

    So while this process computes a step, the earlier stages compute later steps. The results must
    be awaited in the order of the launches. A row's next decode step may be launched only when the
    row's last token is known, because the plan brings this token to the first stage.
    """

    def __init__(self, runner: Runner, ranks: PlanSender) -> None:
        """Use `runner` for the last stage; `ranks` sends the plans to the other stages."""
        self._runner = runner
        self._ranks = ranks
        # The last token of each row, `[num_rows]`.
        self._last: Int32Array = np.zeros(0, dtype=np.int32)

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> Pending:
        """Start to compute a step on the other stages.

        The masks are made now, because they depend on the state for which the step was planned.
        """
        made = None if masks is None else masks.make()
        decoding = plan.rows[: plan.num_decodes]
        self._ranks.send(replace(plan, decode_tokens=self._last[decoding]))
        return _StagedStep(self, plan, made)

    def finish(self, plan: StepPlan, masks: TokenMasks | None) -> StepResult:
        """Compute the last stage of the earliest unfinished step, and return the step's result."""
        try:
            result = self._runner.launch(plan, masks).wait()
        except Exception as error:
            # The other ranks have computed the step and cannot be synchronized again.
            self._ranks.give_up(f"A step of {len(plan.rows)} sequences failed on rank 0.", error)
        rows = plan.sample_rows
        if len(rows):
            most = int(rows.max()) + 1
            if len(self._last) < most:
                self._last = np.pad(self._last, (0, most - len(self._last)))
            # For a row with NaN logits the result is negative; its request ends.
            self._last[rows] = np.maximum(result.token_ids, 0)
        return result


class _StagedStep:
    """A step whose earlier stages are being computed by the other ranks."""

    def __init__(self, runner: StagedRunner, plan: StepPlan, masks: TokenMasks | None) -> None:
        self._runner, self._plan, self._masks = runner, plan, masks

    def wait(self) -> StepResult:
        """Compute the last stage, and return the step's result."""
        return self._runner.finish(self._plan, self._masks)
