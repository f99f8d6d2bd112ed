"""Runs steps: applies row changes, builds the batch, runs the model, samples."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.greedy import NAN_TOKEN
from runtime.executor.batch_rows import BatchRows
from runtime.executor.build_batch import build_batch
from runtime.executor.cuda_graphs import DecodeGraphs
from runtime.executor.device_errors import losing_device, raise_if_lost
from runtime.executor.extend_graphs import ExtendGraphs, GraphResult
from runtime.executor.graph_capture import GraphPool
from runtime.executor.memory import GIB
from runtime.executor.out_of_memory import step_failure
from runtime.executor.row_extras import Named, reported
from runtime.executor.sampling.sampler import Sampler
from runtime.executor.staging import to_device
from runtime.executor.step_plan import (
    Int32Array,
    Int64Array,
    MaskSource,
    StepPlan,
    StepResult,
    TokenMasks,
)
from runtime.models.attention.backend import AttentionBackend
from runtime.models.forward_batch import KVCache
from runtime.models.model import CausalLM

logger = logging.getLogger(__name__)

NAN_MESSAGE = "The model produced NaN logits for this request."
_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass
class Computed:
    """What a step gives, on the device.

    Attributes:
        token_ids: `[num_samples]` int64; `None` when nobody gets a token.
        host_tokens: in their place: on the host once the device has done the step.
        host_places: `[num_samples]`, which of `host_tokens` are the step's; all when absent.
        outputs: what rows ask about their new tokens.
        inputs: what they ask about the step's spans of their prompts.
    """

    token_ids: Tensor | None = None
    host_tokens: Int64Array | None = None
    host_places: Int64Array | None = None
    outputs: list[Named] = field(default_factory=list)
    inputs: list[Named] = field(default_factory=list)


class PendingStep:
    """A launched step whose tokens may still be on their way to the host.

    On a GPU one that gives nobody a token is waited for too: graphs take their inputs from a few
    buffers of the host in turn, so no more steps than these may be on their way.
    """

    def __init__(
        self, plan: StepPlan, computed: Computed, failed: dict[int, str], device: torch.device
    ) -> None:
        """Start the copy of what `device` computes to the host."""
        self._rows = plan.sample_rows
        self._failed = failed
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._tokens, self._places = computed.host_tokens, computed.host_places
        if computed.token_ids is not None:
            self._tokens = self._copy(computed.token_ids).numpy()
        self._outputs = [(name, each.to_host(self._copy)) for name, each in computed.outputs]
        self._inputs = [(name, each.to_host(self._copy)) for name, each in computed.inputs]
        if self._event is not None:
            self._event.record()

    def _copy(self, source: Tensor) -> Tensor:
        if not source.is_cuda:
            return source
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return pinned.copy_(source, non_blocking=True)

    def wait(self) -> StepResult:
        """Block until the step is done, and its tokens on the host.

        Raises:
            DeviceLost: the device failed while it computed.
        """
        if self._event is not None:
            with losing_device():
                self._event.synchronize()
        result = self._tokens_of_rows()
        for row, found in reported(self._outputs):
            result.outputs.setdefault(row, []).append(found)
        for row, found in reported(self._inputs):
            result.inputs[row, found.extra] = found
        return result

    def _tokens_of_rows(self) -> StepResult:
        if self._tokens is None:
            return StepResult(_NO_TOKENS, self._failed)
        tokens = self._tokens if self._places is None else self._tokens[self._places]
        # A copy: later steps write to the same place.
        token_ids = tokens.astype(np.int32)
        bad = token_ids == NAN_TOKEN
        if bad.any():
            for row in self._rows[bad].tolist():
                self._failed.setdefault(row, NAN_MESSAGE)
        return StepResult(token_ids, self._failed)


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


class ModelRunner:
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
        self._rows = rows
        self._page_size = page_size
        self._is_alone = share is None
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

    def launch(self, plan: StepPlan, masks: MaskSource | None = None) -> PendingStep:
        """Start computing `plan`; samples that follow a grammar need `masks`.

        A failure is traced to the sequences that cause it by computing each alone: writing keys
        and values twice is harmless, so the others lose nothing.

        Raises:
            DeviceLost: the device computes nothing right any more.
        """
        self._rows.has_inputs = False
        try:
            self._rows.apply(plan.joins, plan.page_updates)
            return PendingStep(plan, self._compute(plan, masks), {}, self._rows.device)
        except Exception as error:
            raise_if_lost(error)
            if not self._is_alone:
                raise
            logger.exception("A step of %d sequences failed; trying each alone", len(plan.rows))
        # Not in the handler: its traceback would keep the failed step's tensors in memory, which
        # those that are tried alone may need.
        self._rows.take_back(plan.rows[: plan.num_decodes])
        return self._compute_each(plan, masks, self._join_each(plan))

    def _join_each(self, plan: StepPlan) -> dict[int, str]:
        """Apply row changes one by one, once more if need be; the rows that cannot join."""
        failed: dict[int, str] = {}
        for join in plan.joins:
            try:
                self._rows.apply([join], [])
            except Exception as error:
                raise_if_lost(error)
                logger.exception("A request could not take its row; it ends")
                failed[join.row] = step_failure(error)
        self._rows.apply([], plan.page_updates)
        return failed

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
            sampled = self._sampler.sample(logits, plan.rows, seq_lens, _made(masks))
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
        sampled = self._sampler.sample(logits, rows, positions, _made(masks))
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
        sampled = self._sampler.sample(logits, rows, positions, _made(masks))
        return Computed(sampled.token_ids, outputs=sampled.extras + found)

    def _compute_each(
        self, plan: StepPlan, masks: MaskSource | None, failed: dict[int, str]
    ) -> PendingStep:
        token_ids = torch.zeros(len(plan.sample_rows), dtype=torch.int64)
        everything = Computed(token_ids)
        sampled = np.cumsum(plan.samples) - 1
        for index in range(len(plan.rows)):
            if int(plan.rows[index]) in failed:
                continue
            # So many steps on their way would write over what is sent for those ahead.
            if self._rows.device.type == "cuda":
                with losing_device():
                    torch.cuda.synchronize()
            try:
                # Without graphs: so many runs would write over the tokens of the step before, which
                # may not have been read.
                made = _made(masks) if plan.samples[index] else None
                mine = None if made is None else made.only(int(sampled[index]))
                result = self._compute(plan.only(index), mine, with_graphs=False)
            except Exception as error:
                raise_if_lost(error)
                logger.exception("One sequence failed; its request ends")
                failed[int(plan.rows[index])] = step_failure(error)
                continue
            if result.token_ids is not None:
                token_ids[sampled[index]] = result.token_ids[0].cpu()
            everything.outputs += result.outputs
            everything.inputs += result.inputs
        return PendingStep(plan, everything, failed, self._rows.device)


def _made(masks: MaskSource | None) -> TokenMasks | None:
    return None if masks is None else masks.make()
