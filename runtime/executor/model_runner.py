"""Runs steps: applies row changes, builds the batch, runs the model, samples."""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.attention.backend import AttentionBackend
from runtime.executor.batch import build_batch
from runtime.batch_rows import BatchRows
from runtime.step import StepPlan, StepResult
from runtime.forward_batch import ForwardBatch, KVCache
from runtime.sampling.sampler import Sampler

logger = logging.getLogger(__name__)


class CausalModel(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states `[num_tokens, hidden_size]` after the last norm."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits `[num_rows, vocab_size]` float32 of hidden states `[num_rows, hidden_size]`."""
        ...


class PendingStep:
    """A launched step; on the CPU it is complete already."""

    def __init__(self, result: StepResult) -> None:
        """Wrap what is known."""
        self._result = result

    def wait(self) -> StepResult:
        """Block until the tokens are on the host."""
        return self._result


class ModelRunner:
    """Owns the model, the KV pages and the batch rows of one device."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        kv: list[KVCache],
        rows: BatchRows,
        page_size: int,
    ) -> None:
        """Put the parts together."""
        self._model = model
        self._attention = attention
        self._kv = kv
        self._rows = rows
        self._page_size = page_size
        self._sampler = Sampler(rows)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start computing `plan`.

        A failure is traced to the sequences that cause it by computing each alone: writing keys
        and values twice is harmless, so the others lose nothing.
        """
        for join in plan.joins:
            self._rows.join(join)
        for update in plan.page_updates:
            self._rows.update_pages(update)
        try:
            return PendingStep(self._compute(plan))
        except Exception:
            logger.exception("A step of %d sequences failed; trying each alone", len(plan.rows))
            return PendingStep(self._compute_each(plan))

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> StepResult:
        batch = build_batch(plan, self._rows, self._page_size, self._kv, self._attention)
        self._attention.plan(batch)
        hidden = self._model.forward(batch)
        rows = plan.sample_rows
        if not len(rows):
            return StepResult(np.empty(0, dtype=np.int32))
        if len(rows) != len(hidden):
            hidden = hidden.index_select(0, batch.logits_indices)
        logits = self._model.compute_logits(hidden)
        positions = (plan.start_lens + plan.query_lens)[plan.samples]
        token_ids, failed = self._sampler.sample(logits, rows, positions)
        self._sampler.remember(token_ids, rows, positions)
        return StepResult(token_ids.numpy().astype(np.int32), failed)

    def _compute_each(self, plan: StepPlan) -> StepResult:
        token_ids = np.zeros(len(plan.sample_rows), dtype=np.int32)
        failed: dict[int, str] = {}
        sampled = np.cumsum(plan.samples) - 1
        for index in range(len(plan.rows)):
            try:
                result = self._compute(plan.only(index))
            except Exception as error:
                logger.exception("One sequence failed; its request ends")
                failed[int(plan.rows[index])] = f"Internal error: {type(error).__name__}"
                continue
            failed.update(result.failed)
            if plan.samples[index]:
                token_ids[sampled[index]] = result.token_ids[0]
        return StepResult(token_ids, failed)
