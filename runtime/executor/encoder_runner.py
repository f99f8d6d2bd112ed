"""Steps of a model that gives a vector for each text: no pages, no sampler."""

from __future__ import annotations

import numpy as np
import torch

from runtime.executor.batch_rows import BatchRows
from runtime.executor.staging import to_device
from runtime.executor.step_plan import MaskSource, StepPlan
from runtime.executor.step_runner import Computed, StepRunner
from runtime.models.encoder_batch import EncoderBatch
from runtime.models.layers.pooling import pool
from runtime.models.model import TextEncoder


class EncoderRunner(StepRunner):
    """Computes whole texts, each in one step; what is pooled goes out as an extra of its request.

    The scheduler counts a sample for each text, as it does where only something is to be told about
    a prompt; its token means nothing and is sent to nobody.
    """

    def __init__(self, model: TextEncoder, rows: BatchRows, *, is_alone: bool) -> None:
        """Run `model`; `is_alone` where no other rank computes the same steps."""
        super().__init__(rows, is_alone=is_alone)
        self._model = model

    @torch.inference_mode()
    def _compute(
        self,
        plan: StepPlan,
        masks: MaskSource | None = None,  # noqa: ARG002  # nothing is sampled
        *,
        with_graphs: bool = True,  # noqa: ARG002  # there are none
    ) -> Computed:
        batch = pack_texts(plan, self._rows.device)
        pooled = pool(self._model.forward(batch), batch, self._model.spec.pooling)
        return Computed(
            host_tokens=np.zeros(len(plan.sample_rows), dtype=np.int64),
            outputs=self._rows.extras.of_samples("hidden", plan.rows, pooled),
        )


def pack_texts(plan: StepPlan, device: torch.device) -> EncoderBatch:
    """The texts of a step, one after the other; all of them are whole."""
    assert not plan.start_lens.any(), "texts are computed in one step"
    indptr = np.zeros(len(plan.rows) + 1, dtype=np.int64)
    np.cumsum(plan.query_lens, out=indptr[1:])
    starts = np.repeat(indptr[:-1], plan.query_lens)
    ids, positions, bounds = to_device(
        device,
        plan.chunk_tokens.astype(np.int64),
        np.arange(int(indptr[-1]), dtype=np.int64) - starts,
        indptr,
    )
    return EncoderBatch(ids, positions, plan.query_lens.tolist(), bounds)
