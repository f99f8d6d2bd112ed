"""Runs steps: applies row changes, builds the batch, runs the model, samples."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from runtime.executor.batch_rows import BatchRows
from runtime.executor.build_batch import build_batch
from runtime.executor.cuda_graphs import DecodeGraphs
from runtime.executor.extend_graphs import ExtendGraphs, GraphResult
from runtime.executor.graph_capture import GraphPool
from runtime.executor.memory import GIB
from runtime.executor.row_extras import Named
from runtime.executor.sampling.sampler import Sampler
from runtime.executor.staging import to_device
from runtime.executor.step_plan import (
    Int64Array,
    MaskSource,
    StepPlan,
)
from runtime.executor.step_runner import Computed, StepRunner, made_masks
from runtime.models.attention.backend import AttentionBackend
from runtime.models.forward_batch import KVCache
from runtime.models.model import CausalLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphLimits:
    """Which steps run as CUDA graphs.

    Attributes:
        max_batch: decode batches up to this.
        token_sizes: steps with prompt chunks up to these token counts.
        keep_hidden: rows may want hidden states, so graphs keep them too.
        shares_prefixes: some layer sees all keys, so that rows may share the first ones.
    """

    max_batch: int
    token_sizes: list[int] = field(default_factory=list)
    keep_hidden: bool = False
    shares_prefixes: bool = True


class ModelRunner(StepRunner):
    """Owns the model, the KV pages and the batch rows of one device."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv: list[KVCache],
        rows: BatchRows,
        page_size: int,
        *,
        graphs: GraphLimits | None = None,
        share: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            model: loaded.
            attention: planned here, once a step.
            kv: one entry per layer.
            rows: of the running batch.
            page_size: tokens per page.
            graphs: which steps run as CUDA graphs; none when absent.
            share: where several ranks compute each step, gives all of them the tokens of one. A
                step that fails is then not tried again: the ranks would no longer agree.
        """
        self._model = model
        self._attention = attention
        self._kv = kv
        super().__init__(rows, is_alone=share is None)
        self._page_size = page_size
        self._sampler = Sampler(rows, share)
        self._graph_pool: GraphPool | None = None
        self._graphs: DecodeGraphs | None = None
        self._extend_graphs: ExtendGraphs | None = None
        if graphs is not None:
            self._graphs = DecodeGraphs(
                model,
                attention,
                kv,
                rows,
                page_size,
                graphs.max_batch,
                share,
                keep_hidden=graphs.keep_hidden,
                shares_prefixes=graphs.shares_prefixes,
            )
        if graphs is not None and graphs.token_sizes:
            self._extend_graphs = ExtendGraphs(
                model,
                attention,
                kv,
                rows,
                page_size,
                graphs.token_sizes,
                share,
                keep_hidden=graphs.keep_hidden,
            )

    def capture_graphs(self, progress: Callable[[float], None]) -> None:
        """Capture all graphs, if there are to be any; when that fails, there are none."""
        if self._graphs is None:
            return
        if self._graph_pool is None:
            self._graph_pool = GraphPool()
        else:
            self._graph_pool.renew()
        free_before = self._free_bytes()
        try:
            if self._extend_graphs is not None:
                self._extend_graphs.capture(self._graph_pool, progress)
            self._graphs.capture(self._graph_pool, progress)
        except BaseException:
            # Steps look for a graph of their size where there are any.
            self.drop_graphs()
            raise
        free = self._free_bytes()
        if free_before is not None and free is not None:
            logger.info(
                "CUDA graphs take %.2f GiB of what the KV pool left; %.2f GiB stay free",
                (free_before - free) / GIB,
                free / GIB,
            )

    def _free_bytes(self) -> int | None:
        device = self._rows.device
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None

    @property
    def has_graphs(self) -> bool:
        """Whether graphs are captured."""
        return self._graphs is not None and self._graphs.are_captured

    def drop_graphs(self) -> None:
        """Forget the graphs, whose addresses will no longer hold; steps run without them."""
        for graphs in (self._graphs, self._extend_graphs):
            if graphs is not None:
                graphs.drop()

    @torch.inference_mode()
    def _compute(
        self, plan: StepPlan, masks: MaskSource | None = None, *, with_graphs: bool = True
    ) -> Computed:
        num_seqs = len(plan.rows)
        graphs = self._graphs if with_graphs else None
        if graphs is not None and num_seqs == plan.num_decodes and graphs.takes(num_seqs):
            seq_lens = plan.start_lens + 1
            self._rows.grow(plan, self._page_size, is_sent=True)
            self._rows.send_pages()
            is_plain = self._sampler.is_plain(plan.rows)
            tokens = graphs.run(plan.rows, seq_lens, plan.new_pages, wants_logits=not is_plain)
            found = self._of_hidden(plan.rows, graphs.hidden)
            if is_plain:
                return Computed(host_tokens=tokens, outputs=found)
            logits = graphs.logits[:num_seqs]
            sampled = self._sampler.sample(logits, plan.rows, seq_lens, made_masks(masks))
            return Computed(sampled.token_ids, outputs=sampled.extras + found)
        self._rows.grow(plan, self._page_size)
        extend = self._extend_graphs if with_graphs else None
        # A graph gives each sequence's last token only, and looks every token's embedding up.
        unusable = plan.report_spans or plan.embed_spans
        if extend is not None and not unusable and (captured := extend.find(plan)) is not None:
            return self._pick(plan, extend.run(captured, plan), masks)
        self._rows.send_pages()
        batch = build_batch(plan, self._rows, self._page_size, self._kv, self._attention)
        self._attention.plan(batch)
        places = batch.logits_indices
        if plan.report_spans:
            batch.logits_indices = None
        hidden = self._model.forward(batch)
        inputs: list[Named] = []
        if plan.report_spans:
            inputs = self._rows.extras.of_prompts(plan, hidden, self._model.compute_logits)
        rows = plan.sample_rows
        if not len(rows):
            return Computed(inputs=inputs)
        if places is not None and len(rows) != len(hidden):
            hidden = hidden.index_select(0, places)
        logits = self._model.compute_logits(hidden)
        positions = (plan.start_lens + plan.query_lens)[plan.samples]
        sampled = self._sampler.sample(logits, rows, positions, made_masks(masks))
        outputs = sampled.extras + self._of_hidden(rows, hidden)
        return Computed(sampled.token_ids, outputs=outputs, inputs=inputs)

    def _of_hidden(self, rows: Int64Array, hidden: Tensor | None) -> list[Named]:
        extras = self._rows.extras
        if hidden is None or not extras.reads_hidden[rows].any():
            return []
        return extras.of_samples("hidden", rows, hidden)

    def _pick(self, plan: StepPlan, result: GraphResult, masks: MaskSource | None) -> Computed:
        """The tokens of the sequences that want one, from a graph that computed all."""
        rows = plan.sample_rows
        if not len(rows):
            return Computed()
        places = np.flatnonzero(plan.samples)
        is_plain = self._sampler.is_plain(rows)
        if is_plain and result.hidden is None:
            return Computed(host_tokens=result.token_ids, host_places=places)
        (wanted,) = to_device(self._rows.device, places)
        found = []
        if result.hidden is not None:
            found = self._of_hidden(rows, result.hidden.index_select(0, wanted))
        if is_plain:
            return Computed(host_tokens=result.token_ids, host_places=places, outputs=found)
        positions = (plan.start_lens + plan.query_lens)[plan.samples]
        logits = result.logits.index_select(0, wanted)
        sampled = self._sampler.sample(logits, rows, positions, made_masks(masks))
        return Computed(sampled.token_ids, outputs=sampled.extras + found)
