"""Hidden states of a step: picked on the device, read on the host when the step is awaited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.executor.batch_rows import BatchRows
from runtime.executor.staging import to_device
from runtime.executor.step_plan import Float32Array, Int64Array, StepPlan


@dataclass
class StepHidden:
    """Hidden states of `n` lines, on the device or on their way to the host.

    Attributes:
        rows: `[n]`, whose each line is, on the host; lines of one row follow one another.
        values: `[n, hidden_size]` float32.
    """

    rows: Int64Array
    values: Tensor

    def to_host(self, copy: Callable[[Tensor], Tensor]) -> StepHidden:
        """The same with `values` copied by `copy`, which need not wait."""
        return StepHidden(self.rows, copy(self.values))

    def by_row(self) -> dict[int, Float32Array]:
        """Each row's lines; on the host only."""
        values: Float32Array = self.values.numpy()
        starts = np.flatnonzero(np.diff(self.rows, prepend=-1)).tolist()
        ends = [*starts[1:], len(self.rows)]
        return {
            int(self.rows[begin]): values[begin:end]
            for begin, end in zip(starts, ends, strict=True)
        }


def of_samples(rows: BatchRows, sample_rows: Int64Array, hidden: Tensor) -> list[StepHidden]:
    """What the new tokens are made of, for rows that want it.

    Args:
        rows: the running batch.
        sample_rows: `[num_samples]`, on the host.
        hidden: `[num_samples, hidden_size]`, of each one's last token.
    """
    lines = np.flatnonzero(rows.wants_hidden[sample_rows])
    if not len(lines):
        return []
    (index,) = to_device(rows.device, lines)
    return [StepHidden(sample_rows[lines], hidden.index_select(0, index).float())]


def of_prompts(plan: StepPlan, hidden: Tensor) -> list[StepHidden]:
    """The spans of prompts that are reported.

    Args:
        plan: the step.
        hidden: `[num_tokens, hidden_size]`, of every token of the step.
    """
    found: list[StepHidden] = []
    if not plan.hidden_spans:
        return found
    firsts = np.cumsum(plan.query_lens) - plan.query_lens
    for span in plan.hidden_spans:
        begin = int(firsts[span.index]) + span.offset
        values = hidden[begin : begin + span.length].to(torch.float32, copy=True)
        rows = np.full(span.length, plan.rows[span.index], dtype=np.int64)
        found.append(StepHidden(rows, values))
    return found
