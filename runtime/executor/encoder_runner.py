"""Runs the steps of a text encoder, which outputs a vector or scores for each text."""

from __future__ import annotations

import numpy as np
import torch

from runtime.executor.batch_rows import BatchRows
from runtime.executor.model_runner import Computed, StepRunner
from runtime.executor.staging import to_device
from runtime.extras.pooled.device import Numbers
from runtime.models.attention.backend import AttentionBackend
from runtime.models.encoder_batch import EncoderBatch, SharedBeginnings
from runtime.models.model import TextEncoder
from runtime.step.shared_texts import shared_beginnings
from runtime.step.step_plan import Int64Array, MaskSource, StepPlan


class EncoderRunner(StepRunner):
    """Computes whole texts, each in one step, without KV cache and sampling.

    The output of a text is an extra output (an output besides tokens) of its request. The scheduler
    expects a sampled token for each text; it gets a zero, which is not sent to clients.
    """

    def __init__(
        self,
        model: TextEncoder,
        rows: BatchRows,
        *,
        is_alone: bool,
        attention: AttentionBackend | None = None,
    ) -> None:
        """Create a runner for `model`.

        Args:
            model: the loaded model.
            rows: the rows of the running batch.
            is_alone: whether this rank computes the steps alone.
            attention: attention back end; only causal models need it.
        """
        super().__init__(rows, is_alone=is_alone)
        self._model = model
        self._attention = attention

    @torch.inference_mode()
    def _compute(
        self,
        plan: StepPlan,
        masks: MaskSource | None = None,  # noqa: ARG002  # nothing is sampled
        *,
        with_graphs: bool = True,  # noqa: ARG002  # there are none
    ) -> Computed:
        # The pages are not used, so the block tables need not be sent to the device.
        self._rows.forget_unsent()
        extras, device = self._rows.extras, self._rows.device
        reads_hidden = extras.reads_hidden[plan.rows].any()
        batch = None
        if not reads_hidden and self._model.shared_grain:
            batch = pack_shared(plan, device, self._model.shared_grain)
        if batch is None:
            numbers = extras.device_half("pooled")
            parts = numbers.parts(plan.rows) if isinstance(numbers, Numbers) else None
            batch = pack_texts(plan, device, parts)
        batch.attention = self._attention
        computed = Computed(host_tokens=np.zeros(len(plan.sample_rows), dtype=np.int64))
        if reads_hidden:
            hidden = self._model.forward(batch)
            tokens = self._model.head.of_tokens(hidden)
            computed.inputs = extras.of_prompts(plan, tokens, self._model.head.of_tokens)
            lasts = tokens.index_select(0, batch.indptr[1:] - 1)
            computed.outputs = extras.of_samples("hidden", plan.rows, lasts)
            pooled = self._model.head.run(hidden, batch)
        else:
            pooled = self._model.compute(batch)
        computed.outputs += extras.of_samples("pooled", plan.rows, pooled)
        return computed


def pack_shared(plan: StepPlan, device: torch.device, grain: int) -> EncoderBatch | None:
    """Concatenate the texts of a step; compute a common beginning of several texts only once.

    Only for causal models that read the last token of a text.

    Args:
        plan: the step's plan.
        device: where the step is computed.
        grain: common beginnings are rounded down to a multiple of this many tokens.

    Returns:
        The batch; `None` if no texts begin with the same tokens.
    """
    bounds = np.cumsum(plan.query_lens)
    lenders, lengths = shared_beginnings(np.split(plan.chunk_tokens, bounds[:-1]), grain)
    if not lengths.any():
        return None
    text_positions = np.arange(int(bounds[-1])) - np.repeat(
        bounds - plan.query_lens, plan.query_lens
    )
    is_own = text_positions >= np.repeat(lengths, plan.query_lens)
    own = plan.query_lens - lengths
    indptr = np.concatenate([[0], np.cumsum(own)])
    tokens = plan.chunk_tokens[is_own].astype(np.int64)
    ids, positions, own_bounds = to_device(device, tokens, text_positions[is_own], indptr)
    shared = SharedBeginnings(lenders, lengths)
    return EncoderBatch(ids, positions, own.tolist(), own_bounds, shared=shared)


def pack_texts(
    plan: StepPlan, device: torch.device, parts: Int64Array | None = None
) -> EncoderBatch:
    """Concatenate the texts of a step.

    Args:
        plan: the step's plan; each text is complete.
        device: where the step is computed.
        parts: `[num_texts, 2]` int64. The first column has, for a pair of texts, the number of
            tokens of the first text. The second column has the number of prompt tokens to exclude
            from the text's vector. 0 stands for none; `None` if all are 0.
    """
    assert not plan.start_lens.any(), "texts are computed in one step"
    indptr = np.zeros(len(plan.rows) + 1, dtype=np.int64)
    np.cumsum(plan.query_lens, out=indptr[1:])
    starts = np.repeat(indptr[:-1], plan.query_lens)
    text_positions = np.arange(int(indptr[-1]), dtype=np.int64) - starts
    ids, positions, bounds = to_device(
        device, plan.chunk_tokens.astype(np.int64), text_positions, indptr
    )
    batch = EncoderBatch(ids, positions, plan.query_lens.tolist(), bounds)
    if parts is None or not parts.any():
        return batch
    first_parts, prompt_lens = parts.T
    if prompt_lens.any():
        batch.prompt_lens = prompt_lens.tolist()
    if first_parts.any():
        borders = np.where(first_parts, first_parts, plan.query_lens)
        is_second = text_positions >= np.repeat(borders, plan.query_lens)
        (batch.second_parts,) = to_device(device, is_second.astype(np.int64))
    return batch
