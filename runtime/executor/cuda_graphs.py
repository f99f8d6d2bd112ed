"""Decode steps as CUDA graphs, one per padded batch size.

A graph begins by fetching from the host's memory which rows decode, how long they are and their
new pages, from another line each time; everything else (input tokens, page table, KV pages) is
read from device memory at addresses that never change. Steps whose sequences begin with the same
pages have graphs of their own, which read such keys once for all. Its tokens go straight to the
host's memory, to another line each time.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.decode_step import decode_inputs, decode_outputs, fetch_inputs
from kernels.greedy import greedy_tokens
from runtime.executor.batch_rows import BatchRows
from runtime.executor.graph_capture import (
    NUM_HOST_BUFFERS,
    GraphPool,
    HostBuffers,
    capture_graph,
    host_numbers,
)
from runtime.executor.prefix_groups import MIN_BATCH, PrefixGroups
from runtime.executor.step_plan import Int32Array, Int64Array
from runtime.models.attention.backend import AttentionBackend, SharesPrefixes
from runtime.models.forward_batch import ForwardBatch, KVCache
from runtime.models.model import CausalLM

logger = logging.getLogger(__name__)

# Larger batches are rarer than they are allowed: their graphs are captured when they come.
FIRST_BATCHES = 256


def graph_sizes(max_batch: int) -> list[int]:
    """Batch sizes that get a graph: each a quarter to a half more than the one before."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256]
    sizes += range(320, max_batch + 1, 64)
    return sorted({size for size in sizes if size <= max_batch} | {max_batch})


class _Layout:
    """Where each input of a graph lies in a line of int64 numbers."""

    def __init__(self, batch: int) -> None:
        # Each part begins at a multiple of 16 bytes, which kernels are compiled for.
        width = batch + batch % 2
        self.rows = slice(0, batch)
        self.seq_lens = slice(width, width + batch)
        self.new_pages = slice(2 * width, 2 * width + batch)
        self.wants_logits = slice(3 * width, 3 * width + 1)
        self.size = 3 * width + 1

    def pad(self, line: Int64Array, padding_row: int) -> None:
        """Let a line of the host say that nobody decodes."""
        line[: self.size] = 0
        line[self.rows] = padding_row
        line[self.seq_lens] = 1


class DecodeGraphs:
    """Runs decode steps of up to `max_batch` rows.

    Attributes:
        logits: `[max_batch, vocab_size]` float32, what the latest step computed that was asked for
            them.
        hidden: `[max_batch, hidden_size]`, what the logits were made of; `None` unless kept.
    """

    def __init__(  # noqa: PLR0913 what a step is made of, and two choices
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv: list[KVCache],
        rows: BatchRows,
        page_size: int,
        max_batch: int,
        share: Callable[[Tensor], Tensor] | None = None,
        *,
        keep_hidden: bool = False,
        shares_prefixes: bool = True,
    ) -> None:
        """Allocate the static buffers; nothing is captured yet."""
        self._keep_hidden = keep_hidden
        self.hidden: Tensor | None = None
        self._share = share
        self.max_batch = max_batch
        self._model = model
        self._attention = attention
        self._kv = kv
        self._rows = rows
        self._page_size = page_size
        self._sizes = graph_sizes(max_batch)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # Those of steps whose sequences share prefixes.
        self._sharing: dict[int, torch.cuda.CUDAGraph] = {}
        self._prefixes: PrefixGroups | None = None
        if shares_prefixes and isinstance(attention, SharesPrefixes):
            num_kv_heads = kv[0].k.shape[1]
            self._prefixes = PrefixGroups(rows, page_size, num_kv_heads, attention)
        self._pool: GraphPool | None = None
        # Sizes that there was no memory for, and whether for sharing.
        self._refused: set[tuple[int, bool]] = set()
        device = rows.device
        self._layouts = {size: _Layout(size) for size in self._sizes}
        most = self._layouts[max_batch].size
        self._inputs = torch.zeros(most, dtype=torch.int64, device=device)
        self._host = HostBuffers(most, device)
        # The device's count of the host's lines: which one it read last.
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._kept = host_numbers(device, NUM_HOST_BUFFERS, max_batch)
        self._kept_lines = list(self._kept.numpy())
        # A token a sequence: the bounds are the same in every step.
        self._qo_indptr = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self.logits = torch.zeros(max_batch, rows.vocab_size, dtype=torch.float32, device=device)

    def capture(self, pool: GraphPool, progress: Callable[[float], None]) -> None:
        """Capture the graphs of up to `FIRST_BATCHES` rows; larger ones follow when needed.

        Ranks that share each layer capture all of them now: later there is no moment at which a
        rank could say that it has no memory for one.
        """
        started = time.perf_counter()
        self._pool, self._refused = pool, set()
        first = [size for size in self._sizes if size <= FIRST_BATCHES or self._share is not None]
        wanted = [(size, False) for size in first]
        if self._prefixes is not None and self._share is not None:
            wanted += [(size, True) for size in first if size >= MIN_BATCH]
        # Largest first, so that the smaller ones fit into its memory.
        wanted.sort()
        for done, (size, shares) in enumerate(reversed(wanted)):
            progress(done / len(wanted))
            self._capture(size, pool, shares=shares)
        logger.info(
            "Captured %d decode graphs up to batch %d in %.2f s",
            len(wanted),
            first[-1],
            time.perf_counter() - started,
        )
        if self._prefixes is not None and self._share is None and first[-1] >= MIN_BATCH:
            # One of them, so that the kernels compile now; it can be done without.
            self._capture_later(first[-1], pool, shares=True)

    def _capture(self, size: int, pool: GraphPool, *, shares: bool = False) -> None:
        # What is captured runs before, on lines that no step under way reads or writes: those of
        # earlier steps have rows that belong to somebody by now.
        layout = self._layouts[size]
        for line in self._host.free():
            layout.pad(line.numpy(), self._rows.padding_row)
        graphs = self._graphs
        if shares and self._prefixes is not None:
            graphs = self._sharing
            self._prefixes.clear()
        try:
            graphs[size] = capture_graph(lambda: self._decode(size, shares=shares), pool)
        finally:
            self._turn.fill_(self._host.turn)

    def _capture_later(self, size: int, pool: GraphPool, *, shares: bool) -> None:
        started = time.perf_counter()
        try:
            self._capture(size, pool, shares=shares)
        except Exception as error:
            # Out of memory has many names in what a capture calls; whatever it is, trying it again
            # at every step would be worse than doing without.
            self._refused.add((size, shares))
            if self._turn.is_cuda:
                # What was launched of it reads a line that the next step writes.
                torch.cuda.synchronize()
            instead = "reads shared prefixes row by row" if shares else "runs without"
            logger.warning("No CUDA graph for batch %d: it %s (%s)", size, instead, error)
            return
        seconds = time.perf_counter() - started
        prefixes = ", for shared prefixes" if shares else ""
        logger.info("Captured the decode graph of batch %d%s in %.2f s", size, prefixes, seconds)

    @property
    def are_captured(self) -> bool:
        """Whether there are graphs to run."""
        return bool(self._graphs)

    def drop(self) -> None:
        """Forget every graph; `capture` makes them again."""
        self._graphs.clear()
        self._sharing.clear()

    def takes(self, batch: int) -> bool:
        """Whether a decode batch of this size has a graph; captures it when it is the first one."""
        if not self._graphs or batch > self.max_batch:
            return False
        return self._has(self._padded(batch))

    def _has(self, size: int, *, shares: bool = False) -> bool:
        graphs = self._sharing if shares else self._graphs
        refused = (size, shares) in self._refused
        if size not in graphs and not refused and self._pool is not None:
            self._capture_later(size, self._pool, shares=shares)
        return size in graphs

    def run(
        self,
        rows: Int64Array,
        seq_lens: Int64Array,
        new_pages: Int32Array | None = None,
        *,
        wants_logits: bool = True,
    ) -> Int64Array:
        """Decode one token of each row.

        Args:
            rows: `[batch]`, at most `max_batch`.
            seq_lens: `[batch]`, keys of each row once this step's are written.
            new_pages: `[batch]`, the page that a row's new token begins, 0 for none; none at all
                when absent.
            wants_logits: whether `logits` is read afterwards.

        Returns:
            `[batch]`, the largest logit's token of each row, `NAN_TOKEN` for NaN: once the device
            has done all this, and until the fourth run from now.
        """
        batch = len(rows)
        size = self._padded(batch)
        graph = self._graphs[size]
        prefixes = self._prefixes
        if prefixes is not None and prefixes.find(rows, seq_lens) and self._has(size, shares=True):
            prefixes.send()
            graph = self._sharing[size]
        turn, layout = self._host.following, self._layouts[size]
        view = self._host.lines[turn].numpy()
        layout.pad(view, self._rows.padding_row)
        view[layout.rows][:batch] = rows
        view[layout.seq_lens][:batch] = seq_lens
        if new_pages is not None:
            view[layout.new_pages][:batch] = new_pages
        view[layout.wants_logits] = wants_logits
        graph.replay()
        # Both counts go on together: a graph that could not be launched counts on neither side.
        self._host.turn = turn
        self._rows.has_inputs = True
        return self._kept_lines[turn][:batch]

    def _padded(self, batch: int) -> int:
        return self._sizes[bisect.bisect_left(self._sizes, batch)]

    @torch.inference_mode()
    def _decode(self, size: int, *, shares: bool) -> None:
        layout, state = self._layouts[size], self._rows
        inputs = self._inputs[: layout.size]
        fetch_inputs(self._host.lines, self._turn, inputs)
        rows = inputs[layout.rows]
        read = decode_inputs(
            rows,
            inputs[layout.seq_lens],
            inputs[layout.new_pages],
            state.last_token,
            state.latest_input,
            state.page_table,
            self._page_size,
        )
        batch = ForwardBatch(
            input_ids=read.input_ids,
            positions=read.positions,
            slots=read.slots,
            qo_indptr=self._qo_indptr[: size + 1],
            seq_lens=read.seq_lens,
            page_table=read.page_table,
            num_decodes=size,
            logits_indices=None,
            kv=self._kv,
            attention=self._attention,
            shares_prefixes=shares,
        )
        self._attention.plan(batch)
        hidden = self._model.forward(batch)
        if self._keep_hidden:
            if self.hidden is None:
                # Made by the first run before a capture, for every size: one place for all graphs.
                self.hidden = hidden.new_zeros(self.max_batch, hidden.shape[1])
            self.hidden[:size].copy_(hidden)
        token_ids = greedy_tokens(
            self._model.model_logits(hidden), self.logits[:size], inputs[layout.wants_logits]
        )
        if self._share is not None:
            token_ids = self._share(token_ids)
        decode_outputs(token_ids, rows, self._turn, state.last_token, self._kept)
