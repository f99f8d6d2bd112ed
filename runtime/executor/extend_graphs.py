"""Small prompt chunks, with decoding rows beside them, as CUDA graphs.

A model of a few hundred million parameters computes a short prompt faster than Python can launch
its kernels one by one. A graph is captured for a number of tokens and of sequences; a smaller step
runs in it with padding, whose keys and values are written nowhere. Its tokens go straight to the
host's memory, to another line each time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.decode_step import decode_outputs
from kernels.greedy import greedy_tokens
from runtime.executor.batch_rows import BatchRows
from runtime.executor.graph_capture import (
    NUM_HOST_BUFFERS,
    GraphPool,
    HostBuffers,
    capture_graph,
    host_numbers,
)
from runtime.executor.step_plan import Int64Array, StepPlan
from runtime.models.attention.backend import AttentionBackend
from runtime.models.forward_batch import ForwardBatch, KVCache
from runtime.models.model import CausalLM

logger = logging.getLogger(__name__)

TOKEN_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# A prompt or a few alone.
FEW_PROMPTS = 4
# Newcomers beside a decoding batch: sequences altogether.
MIXED_SIZES = (96, 256)
# Launching a step's kernels from Python takes 14 to 25 milliseconds for 32 layers, by the host; a
# step that computes for longer hides it, and padding would only add work.
_LAUNCH_BOUND_S = 15e-3
_MATRIX_FLOPS = 600e12
# In long prompts attention counts, and outside a graph it has a faster kernel for whole ones. Up to
# here that saves 4% of such a step at most, which a busy host's launches cost.
_MANY_TOKENS, _LONG_PROMPT = 2048, 4096


def graph_token_sizes(num_parameters: int, max_tokens: int) -> list[int]:
    """Token counts up to `max_tokens` whose step is bound by launches, for a model's size."""
    most = min(_LAUNCH_BOUND_S * _MATRIX_FLOPS / (2 * num_parameters), max_tokens)
    return [size for size in TOKEN_SIZES if size <= most]


class _Shape(NamedTuple):
    """What steps a graph holds; where rows decode, attention needs another kernel too."""

    num_tokens: int
    num_seqs: int
    has_decodes: bool


def _shapes(token_sizes: list[int], max_seqs: int) -> list[_Shape]:
    """Return every graph's, so that the first one that holds a step is the smallest."""
    kinds = [(min(FEW_PROMPTS, max_seqs), False)]
    if max_seqs > 1:
        # None for which the largest could stand as well.
        largest = min(MIXED_SIZES[-1], max_seqs)
        sizes = [size for size in MIXED_SIZES if 4 * size <= 3 * largest]
        kinds += [(size, True) for size in [*sizes, largest]]
    shapes = [_Shape(tokens, *kind) for kind in kinds for tokens in token_sizes]
    return [shape for shape in shapes if shape.num_seqs <= shape.num_tokens]


class GraphResult(NamedTuple):
    """Of each sequence's last token.

    Attributes:
        logits: `[num_seqs, vocab_size]` float32.
        token_ids: `[num_seqs]`, the largest logits' tokens, `NAN_TOKEN` for NaN: on the host once
            the device has done all this, and until the graph's fourth run from now.
        hidden: `[num_seqs, hidden_size]`, unless none are kept.
    """

    logits: Tensor
    token_ids: Int64Array
    hidden: Tensor | None


class _Layout:
    """Where each input lies in a graph's buffer of int64 numbers."""

    def __init__(self, num_tokens: int, num_seqs: int, page_size: int) -> None:
        self.ids = slice(0, num_tokens)
        self.rows_of_tokens = slice(num_tokens, 2 * num_tokens)
        self.positions = slice(2 * num_tokens, 3 * num_tokens)
        self.slots = slice(3 * num_tokens, 4 * num_tokens)
        start = 4 * num_tokens
        self.rows = slice(start, start + num_seqs)
        self.seq_lens = slice(start + num_seqs, start + 2 * num_seqs)
        self.samples = slice(start + 2 * num_seqs, start + 3 * num_seqs)
        self.indptr = slice(start + 3 * num_seqs, start + 4 * num_seqs + 1)
        self.turn = slice(start + 4 * num_seqs + 1, start + 4 * num_seqs + 2)
        # Entries of the page table that come with the step: those of its own tokens, at least.
        start += 4 * num_seqs + 2
        self.num_places = num_tokens // page_size + 2 * num_seqs
        self.places = slice(start, start + self.num_places)
        self.pages = slice(start + self.num_places, start + 2 * self.num_places)
        self.size = start + 2 * self.num_places


class _Captured:
    """One graph with its static input and outputs."""

    def __init__(self, shape: _Shape, rows: BatchRows, page_size: int) -> None:
        self.shape = shape
        num_tokens, num_seqs, _ = shape
        self.layout = _Layout(num_tokens, num_seqs, page_size)
        self.host = HostBuffers(self.layout.size, rows.device)
        self.inputs = torch.zeros(self.layout.size, dtype=torch.int64, device=rows.device)
        self.kept = host_numbers(rows.device, NUM_HOST_BUFFERS, num_seqs)
        self.kept_lines: list[Int64Array] = list(self.kept.numpy())
        self.hidden: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None


class ExtendGraphs:
    """Runs steps with prompt chunks, up to a number of tokens, as graphs."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv: list[KVCache],
        rows: BatchRows,
        page_size: int,
        token_sizes: list[int],
        share: Callable[[Tensor], Tensor] | None = None,
        *,
        keep_hidden: bool = False,
    ) -> None:
        """Nothing is captured yet."""
        self._keep_hidden = keep_hidden
        self._share = share
        self._model = model
        self._attention = attention
        self._kv = kv
        self._rows = rows
        self._page_size = page_size
        # An entry that stays as it is, whoever writes there.
        self._padding_place = rows.padding_row * rows.page_table.shape[1]
        self._shapes = _shapes(token_sizes, rows.padding_row)
        self._graphs: dict[_Shape, _Captured] = {}
        # One for all graphs: of a large vocabulary it takes more memory than a graph itself.
        self._logits: Tensor | None = None

    def capture(self, pool: GraphPool, progress: Callable[[float], None]) -> None:
        """Capture every graph, largest first."""
        started = time.perf_counter()
        rows = self._rows
        self._logits = torch.zeros(
            max((shape.num_seqs for shape in self._shapes), default=0),
            rows.vocab_size,
            dtype=torch.float32,
            device=rows.device,
        )
        largest_first = sorted(self._shapes, key=lambda shape: shape[:2], reverse=True)
        for done, shape in enumerate(largest_first):
            progress(done / len(self._shapes))
            captured = _Captured(shape, rows, self._page_size)
            self._fill_padding(captured)
            captured.graph = capture_graph(lambda c=captured: self._extend(c), pool)  # type: ignore[misc]
            self._graphs[shape] = captured
        if self._shapes:
            seconds = time.perf_counter() - started
            logger.info("Captured %d prompt graphs in %.2f s", len(self._shapes), seconds)

    def drop(self) -> None:
        """Forget every graph; `capture` makes them again."""
        self._graphs.clear()
        self._logits = None

    def find(self, plan: StepPlan) -> _Captured | None:
        """The smallest graph that holds the step, if there is one."""
        num_tokens, num_seqs = int(plan.query_lens.sum()), len(plan.rows)
        if num_tokens > _MANY_TOKENS and int(plan.query_lens.max()) > _LONG_PROMPT:
            return None
        for shape in self._shapes:
            is_large_enough = num_tokens <= shape.num_tokens and num_seqs <= shape.num_seqs
            if is_large_enough and (shape.has_decodes or not plan.num_decodes):
                return self._graphs.get(shape)
        return None

    def run(self, captured: _Captured, plan: StepPlan) -> GraphResult:
        """Compute `plan` in a graph that holds it.

        Returns:
            What belongs to the plan's sequences; all but the tokens is overwritten by the next run.
        """
        rows, layout = self._rows, captured.layout
        num_seqs = len(plan.rows)
        num_tokens = int(plan.query_lens.sum())
        indptr = np.zeros(num_seqs + 1, dtype=np.int64)
        np.cumsum(plan.query_lens, out=indptr[1:])
        token_rows = np.repeat(plan.rows, plan.query_lens)
        positions = np.arange(num_tokens) + np.repeat(
            plan.start_lens - indptr[:-1], plan.query_lens
        )
        pages = rows.page_table_host[token_rows, positions // self._page_size].astype(np.int64)
        new_places, new_pages = rows.unsent_pages()
        if len(new_places) > layout.num_places:
            # Those of a long cached prefix.
            rows.send_pages()
            new_places, new_pages = rows.unsent_pages()
        host = captured.host.next()
        view = host.numpy()
        view[layout.ids] = 0
        view[layout.ids][: plan.num_decodes] = -1
        view[layout.ids][plan.num_decodes : num_tokens] = plan.chunk_tokens
        view[layout.rows_of_tokens] = rows.padding_row
        view[layout.rows_of_tokens][:num_tokens] = token_rows
        view[layout.positions] = 0
        view[layout.positions][:num_tokens] = positions
        view[layout.slots] = -1
        view[layout.slots][:num_tokens] = pages * self._page_size + positions % self._page_size
        view[layout.rows] = rows.padding_row
        view[layout.rows][:num_seqs] = plan.rows
        view[layout.seq_lens] = 0
        view[layout.seq_lens][:num_seqs] = plan.start_lens + plan.query_lens
        view[layout.samples] = 0
        view[layout.samples][:num_seqs] = indptr[1:] - 1
        view[layout.indptr] = num_tokens
        view[layout.indptr][: num_seqs + 1] = indptr
        view[layout.turn] = turn = captured.host.turn
        view[layout.places], view[layout.pages] = self._padding_place, 0
        view[layout.places][: len(new_places)] = new_places
        view[layout.pages][: len(new_pages)] = new_pages
        captured.inputs.copy_(host, non_blocking=True)
        assert captured.graph is not None
        assert self._logits is not None
        captured.graph.replay()
        rows.forget_unsent()
        rows.has_inputs = True
        hidden = None if captured.hidden is None else captured.hidden[:num_seqs]
        return GraphResult(self._logits[:num_seqs], captured.kept_lines[turn][:num_seqs], hidden)

    def _fill_padding(self, captured: _Captured) -> None:
        layout, padding = captured.layout, self._rows.padding_row
        captured.inputs[layout.slots] = -1
        captured.inputs[layout.rows_of_tokens] = padding
        captured.inputs[layout.rows] = padding
        captured.inputs[layout.places] = self._padding_place

    @torch.inference_mode()
    def _extend(self, captured: _Captured) -> None:
        state, layout, inputs = self._rows, captured.layout, captured.inputs
        given, rows = inputs[layout.ids], inputs[layout.rows]
        new_pages = inputs[layout.pages].to(torch.int32)
        state.page_table.view(-1).index_copy_(0, inputs[layout.places], new_pages)
        last = state.inputs(inputs[layout.rows_of_tokens])
        batch = ForwardBatch(
            input_ids=torch.where(given < 0, last, given),
            positions=inputs[layout.positions],
            slots=inputs[layout.slots],
            qo_indptr=inputs[layout.indptr].to(torch.int32),
            seq_lens=inputs[layout.seq_lens].to(torch.int32),
            page_table=state.page_table.index_select(0, rows),
            num_decodes=None if captured.shape.has_decodes else 0,
            logits_indices=inputs[layout.samples],
            kv=self._kv,
            attention=self._attention,
        )
        self._attention.plan(batch)
        hidden = self._model.forward(batch)
        # Kept only where somebody may ask: a tensor that lives on is memory no other graph uses.
        captured.hidden = hidden if self._keep_hidden else None
        assert self._logits is not None
        logits = self._logits[: captured.shape.num_seqs]
        token_ids = greedy_tokens(self._model.model_logits(hidden), logits)
        if self._share is not None:
            token_ids = self._share(token_ids)
        decode_outputs(token_ids, rows, inputs[layout.turn], state.last_token, captured.kept)
