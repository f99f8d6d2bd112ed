"""Runs steps: applies row changes, builds the batch, runs the model, samples."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from runtime.attention.backend import AttentionBackend
from runtime.batch_rows import BatchRows
from runtime.executor.batch import build_batch
from runtime.executor.causal_model import CausalModel
from runtime.executor.cuda_graphs import DecodeGraphs
from runtime.executor.extend_graphs import ExtendGraphs
from runtime.forward_batch import KVCache
from runtime.sampling.sampler import NAN_TOKEN, Sampler
from runtime.staging import to_device
from runtime.step import Int32Array, StepPlan, StepResult

logger = logging.getLogger(__name__)

NAN_MESSAGE = "The model produced NaN logits for this request."
_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


class PendingStep:
    """A launched step whose tokens may still be on their way to the host."""

    def __init__(self, plan: StepPlan, token_ids: Tensor | None, failed: dict[int, str]) -> None:
        """Start the copy of `token_ids`, `[num_samples]` int64, to the host."""
        self._rows = plan.sample_rows
        self._failed = failed
        self._tokens = token_ids
        self._event: torch.cuda.Event | None = None
        if token_ids is not None and token_ids.is_cuda:
            self._tokens = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._tokens.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> StepResult:
        """Block until the tokens are on the host."""
        if self._tokens is None:
            return StepResult(_NO_TOKENS, self._failed)
        if self._event is not None:
            self._event.synchronize()
        token_ids = self._tokens.numpy().astype(np.int32)
        bad = token_ids == NAN_TOKEN
        if bad.any():
            for row in self._rows[bad].tolist():
                self._failed.setdefault(row, NAN_MESSAGE)
        return StepResult(token_ids, self._failed)


class ModelRunner:
    """Owns the model, the KV pages and the batch rows of one device."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        kv: list[KVCache],
        rows: BatchRows,
        page_size: int,
        *,
        graph_max_batch: int = 0,
        graph_token_sizes: list[int] | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            model: loaded.
            attention: planned here, once a step.
            kv: one entry per layer.
            rows: of the running batch.
            page_size: tokens per page.
            graph_max_batch: decode batches up to this run as CUDA graphs.
            graph_token_sizes: steps with prompt chunks up to these token counts do too.
        """
        self._model = model
        self._attention = attention
        self._kv = kv
        self._rows = rows
        self._page_size = page_size
        self._sampler = Sampler(rows)
        self._graphs: DecodeGraphs | None = None
        self._extend_graphs: ExtendGraphs | None = None
        if graph_max_batch:
            self._graphs = DecodeGraphs(model, attention, kv, rows, page_size, graph_max_batch)
        if graph_token_sizes:
            self._extend_graphs = ExtendGraphs(
                model, attention, kv, rows, page_size, graph_token_sizes
            )

    def capture_graphs(self, progress: Callable[[float], None]) -> None:
        """Capture the decode graphs, if there are to be any."""
        if self._graphs is None:
            return
        pool = torch.cuda.graph_pool_handle()
        if self._extend_graphs is not None:
            self._extend_graphs.capture(pool, progress)
        self._graphs.capture(pool, progress)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start computing `plan`.

        A failure is traced to the sequences that cause it by computing each alone: writing keys
        and values twice is harmless, so the others lose nothing.
        """
        self._rows.apply(plan.joins, plan.page_updates)
        try:
            return PendingStep(plan, self._compute(plan), {})
        except Exception:
            if torch.cuda.is_initialized() and not _device_works():
                # A broken CUDA context computes nothing right any more: the process must end.
                raise
            logger.exception("A step of %d sequences failed; trying each alone", len(plan.rows))
            return self._compute_each(plan)

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> Tensor | None:
        num_seqs = len(plan.rows)
        graphs = self._graphs
        if graphs is not None and num_seqs == plan.num_decodes and graphs.takes(num_seqs):
            seq_lens = plan.start_lens + 1
            graphs.run(plan.rows, seq_lens)
            if self._sampler.is_plain(plan.rows):
                # A copy: the next replay overwrites the graph's own.
                return graphs.token_ids[:num_seqs].clone()
            return self._sampler.sample(graphs.logits[:num_seqs], plan.rows, seq_lens, plan.masks)
        extend = self._extend_graphs
        if extend is not None and (captured := extend.find(plan)) is not None:
            logits, token_ids = extend.run(captured, plan)
            return self._pick(plan, logits, token_ids)
        batch = build_batch(plan, self._rows, self._page_size, self._kv, self._attention)
        self._attention.plan(batch)
        hidden = self._model.forward(batch)
        rows = plan.sample_rows
        if not len(rows):
            return None
        if len(rows) != len(hidden):
            hidden = hidden.index_select(0, batch.logits_indices)
        logits = self._model.compute_logits(hidden)
        positions = (plan.start_lens + plan.query_lens)[plan.samples]
        return self._sampler.sample(logits, rows, positions, plan.masks)

    def _pick(self, plan: StepPlan, logits: Tensor, token_ids: Tensor) -> Tensor | None:
        """The tokens of the sequences that want one, from a graph that computed all."""
        rows = plan.sample_rows
        if not len(rows):
            return None
        if self._sampler.is_plain(rows):
            if len(rows) == len(plan.rows):
                return token_ids.clone()
            (wanted,) = to_device(self._rows.device, np.flatnonzero(plan.samples))
            return token_ids.index_select(0, wanted)
        (wanted,) = to_device(self._rows.device, np.flatnonzero(plan.samples))
        positions = (plan.start_lens + plan.query_lens)[plan.samples]
        return self._sampler.sample(logits.index_select(0, wanted), rows, positions, plan.masks)

    def _compute_each(self, plan: StepPlan) -> PendingStep:
        token_ids = torch.zeros(len(plan.sample_rows), dtype=torch.int64)
        failed: dict[int, str] = {}
        sampled = np.cumsum(plan.samples) - 1
        for index in range(len(plan.rows)):
            try:
                result = self._compute(plan.only(index))
            except Exception as error:
                logger.exception("One sequence failed; its request ends")
                failed[int(plan.rows[index])] = f"Internal error: {type(error).__name__}"
                continue
            if result is not None:
                token_ids[sampled[index]] = result[0].cpu()
        return PendingStep(plan, token_ids, failed)


def _device_works() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
