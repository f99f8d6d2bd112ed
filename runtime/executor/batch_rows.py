"""The executor's state of the running batch: one row per request, written only when it changes.

The device holds the data that steps read and write: next input tokens, block tables, generated
tokens. The host holds the sampling parameters, and data for its own decisions, such as which rows
are greedy. One extra row represents the padding of a CUDA graph's batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.rope_rows import RopeRows
from runtime.executor.row_extras import RowExtras
from runtime.executor.staging import to_device
from runtime.executor.window_map import WindowMap
from runtime.models.layers.adapter_slots import AdapterSlots
from runtime.requests.sampling_params import SamplingParams
from runtime.step.step_plan import (
    Int32Array,
    Int64Array,
    PageUpdate,
    RowJoin,
    StepPlan,
    WindowUpdate,
)

_NO_ENTRIES: Int64Array = np.zeros(0, dtype=np.int64)
_NO_BIASES = (_NO_ENTRIES, np.zeros(0, dtype=np.float32))
_NUM_PARAMS = 6


class BatchRows:
    """The rows of the running batch on one rank.

    Attributes:
        padding_row: index of the last row, which pads batches; all its pages are page 0.
        page_table: `[max_rows + 1, max_pages]` int32 on the device: the block table of each row.
        last_token: `[max_rows + 1]` int64 on the device: the token that each row reads in its next
            decode step.
        latest_input: `[max_rows + 1]` int64 on the device: a copy of what the latest step read from
            `last_token`. A step overwrites `last_token` with its results; a step that is retried
            restores it from this copy.
        num_changes: how often a request took a row, or a row got pages for another reason than
            decoding.
        has_inputs: whether the step being launched has read its input tokens.
        params: `[max_rows + 1, 6]` float32 on the host: temperature, top_p, min_p, frequency
            penalty, presence penalty, repetition penalty. They are sent only with a step that
            samples, because most rows are greedy and do not need them.
        seeds: `[max_rows + 1]` int64 on the host, seeds of the sampling.
        top_k: `[max_rows + 1]` int32 on the host; the vocabulary's size if top-k is off.
        num_prompt: `[max_rows + 1]` int64 on the host, number of prompt tokens.
        biases: for each row the token ids, int64, and the values that are added to their logits,
            float32.
        is_greedy, has_penalties, has_grammar: `[max_rows + 1]` bool on the host.
        has_token_rules: `[max_rows + 1]` bool on the host: whether the row has logit biases or a
            minimum length.
        edits_logits: `[max_rows + 1]` bool on the host: whether the row has penalties or token
            rules.
        extras: the extra outputs, such as log-probabilities, that each row requests.
        rope: RoPE positions of the rows; `None` if a token's position is always its index.
        adapters: tells the layers the LoRA adapter of each token of a step; `None` without
            adapters.
        windows: pages of sliding-window layers; `None` unless these layers have pages of their own.
    """

    TEMPERATURE, TOP_P, MIN_P, FREQUENCY, PRESENCE, REPETITION = range(_NUM_PARAMS)

    def __init__(
        self,
        max_rows: int,
        max_pages: int,
        max_len: int,
        vocab_size: int,
        device: torch.device | None = None,
        *,
        image_cell: int = 0,
        eos_token_ids: Sequence[int] = (),
        adapters: AdapterSlots | None = None,
    ) -> None:
        """Allocate rows for `max_rows` requests of at most `max_len` tokens.

        Args:
            max_rows: maximum number of requests of a step.
            max_pages: maximum number of pages of a request.
            max_len: maximum number of tokens of a request.
            vocab_size: width of the logits.
            device: where steps are computed; the CPU by default.
            image_cell: side in pixels of the square that one image token covers, if image tokens
                have RoPE positions of their own; else 0.
            eos_token_ids: token ids that end an output. They are forbidden until a row has its
                `min_new_tokens`.
            adapters: the adapter slots of the model's layers; `None` without adapters.
        """
        self.device = device or torch.device("cpu")
        self.vocab_size = vocab_size
        self.padding_row = max_rows
        self._max_len = max_len
        self._eos = list(eos_token_ids)
        rows = max_rows + 1
        self.page_table_host: NDArray[np.int32] = np.zeros((rows, max_pages), dtype=np.int32)
        self._shares_memory = self.device.type == "cpu"
        self.page_table = torch.from_numpy(self.page_table_host)
        if not self._shares_memory:
            self.page_table = self.page_table.to(self.device)
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.latest_input = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.has_inputs = False
        self.num_changes = 0
        self.params: NDArray[np.float32] = np.zeros((rows, _NUM_PARAMS), dtype=np.float32)
        self.seeds: Int64Array = np.zeros(rows, dtype=np.int64)
        self.top_k: NDArray[np.int32] = np.full(rows, vocab_size, dtype=np.int32)
        self.num_prompt: Int64Array = np.zeros(rows, dtype=np.int64)
        self.sampling: list[SamplingParams | None] = [None] * rows
        self.stop_ids: list[list[int]] = [[] for _ in range(rows)]
        self.biases: list[tuple[Int64Array, NDArray[np.float32]]] = [_NO_BIASES] * rows
        self.is_greedy = np.ones(rows, dtype=bool)
        self.edits_logits = np.zeros(rows, dtype=bool)
        self.has_penalties = np.zeros(rows, dtype=bool)
        self.extras = RowExtras(rows, vocab_size, self.device)
        self.rope = RopeRows(rows, image_cell, self.device) if image_cell else None
        self.has_grammar = np.zeros(rows, dtype=bool)
        self.has_token_rules = np.zeros(rows, dtype=bool)
        self.adapters = adapters
        self.windows: WindowMap | None = None
        # The slot of each row's adapter, -1 for none, on the host and on the device.
        self._slots_host: Int32Array = np.full(rows, -1, dtype=np.int32)
        self._slots = torch.full((rows,), -1, dtype=torch.int32, device=self.device)
        self._slots_changed = False
        self._history: Tensor | None = None
        # Flat indices of entries in the page table that were not sent to the device yet. The values
        # are read from the host's table when they are sent, because an entry may have changed since
        # a failed step.
        self._unsent: list[Int64Array] = []

    def inputs(self, index: Tensor) -> Tensor:
        """Return the next input tokens of rows that decode, `[n]` int64 on the device.

        Args:
            index: `[n]` int64 on the device, indices of the rows, possibly repeated.
        """
        tokens = self.last_token.index_select(0, index)
        self.latest_input.index_copy_(0, index, tokens)
        return tokens

    def set_inputs(self, rows: Int64Array, token_ids: Int32Array) -> None:
        """Set the next input tokens of rows whose last token was sampled on another rank.

        Args:
            rows: `[n]` int64, indices of the rows.
            token_ids: `[n]` int32, their tokens.
        """
        index, tokens = to_device(self.device, rows, token_ids.astype(np.int64))
        self.last_token.index_copy_(0, index, tokens)

    @torch.inference_mode()
    def take_back(self, rows: Int64Array) -> None:
        """Restore the input tokens of rows, if a failed step had read and overwritten them."""
        if self.has_inputs and len(rows):
            (index,) = to_device(self.device, rows)
            self.last_token.index_copy_(0, index, self.latest_input.index_select(0, index))

    # Sampling creates the history in inference mode, so it may only be written in that mode.
    @torch.inference_mode()
    def apply(
        self,
        joins: list[RowJoin],
        updates: list[PageUpdate],
        windows: WindowUpdate | None = None,
    ) -> None:
        """Reset the rows of new requests, and write changed block tables on the host.

        `send_pages` sends the block tables to the device.
        """
        if self.windows is not None and windows is not None:
            self.windows.update(windows)
        self.num_changes += bool(joins or updates)
        for join in joins:
            self._join(join)
        if self._slots_changed:
            # The copy keeps a later change from reaching a step in flight.
            (slots,) = to_device(self.device, self._slots_host.copy())
            self._slots.copy_(slots)
            self._slots_changed = False
        if updates:
            self._update_pages(updates)

    def _join(self, join: RowJoin) -> None:
        row, sampling = join.row, join.spec.sampling
        greedy = sampling.is_greedy
        self.sampling[row] = sampling
        self.stop_ids[row] = [*self._eos, *sampling.stop_token_ids]
        self.num_prompt[row] = join.num_prompt
        self.is_greedy[row] = greedy
        self.has_penalties[row] = sampling.has_penalties
        self.has_grammar[row] = join.has_grammar
        # Biases become arrays once and not at each step: a request may bias the whole vocabulary.
        num_biases = len(sampling.logit_bias)
        self.biases[row] = (
            np.fromiter(sampling.logit_bias.keys(), dtype=np.int64, count=num_biases),
            np.fromiter(sampling.logit_bias.values(), dtype=np.float32, count=num_biases),
        )
        has_token_rules = bool(num_biases) or sampling.min_new_tokens > 0
        self.has_token_rules[row] = has_token_rules
        self.edits_logits[row] = has_token_rules or sampling.has_penalties
        self.params[row] = (
            0.0 if greedy else sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
        )
        self.seeds[row] = sampling.seed or 0
        self.top_k[row] = sampling.top_k if sampling.top_k > 0 else self.vocab_size
        self.extras.join(row, join.spec.extras)
        if self.rope is not None:
            self.rope.join(row, join.images)
        if join.adapter_slot != self._slots_host[row]:
            self._slots_host[row] = join.adapter_slot
            self._slots_changed = True
        self.page_table_host[row] = 0
        if sampling.has_penalties and len(join.output_ids):
            (output_ids,) = to_device(self.device, join.output_ids.astype(np.int64))
            self.history()[row, : len(join.output_ids)] = output_ids

    def choose_adapters(self, rows: Int64Array) -> Int32Array:
        """Enable the adapters in the layers if a step of these rows uses any.

        Returns:
            int32, the adapter slot of each row; -1 for a row without an adapter.
        """
        slots = self._slots_host[rows]
        if self.adapters is not None:
            self.adapters.is_on = bool((slots >= 0).any())
        return slots

    def begin_adapters(self, token_rows: Tensor) -> AdapterSlots | None:
        """Set which adapter each token of a step uses, if the step uses any.

        Args:
            token_rows: `[num_tokens]` int64 on the device, the row of each token.

        Returns:
            `adapters`, for `ForwardBatch.adapters`; `None` if the server takes none.
        """
        if self.adapters is not None and self.adapters.is_on:
            self.adapters.begin(self._slots.index_select(0, token_rows))
        return self.adapters

    def grow(self, plan: StepPlan, page_size: int, *, is_sent: bool = False) -> None:
        """Write the new pages of the plan's decoding rows to the block tables on the host.

        Args:
            plan: the step's plan.
            page_size: number of tokens per page.
            is_sent: whether the step itself sends these pages to the device.
        """
        if plan.new_pages is None:
            return
        grown = np.flatnonzero(plan.new_pages)
        rows, pages = plan.rows[grown], plan.new_pages[grown]
        # Index of the first page after those of the computed tokens.
        entries = -(-plan.start_lens[grown] // page_size)
        self.page_table_host[rows, entries] = pages
        if not is_sent and not self._shares_memory:
            self._unsent.append(rows * self.page_table_host.shape[1] + entries)

    def _update_pages(self, updates: list[PageUpdate]) -> None:
        width = self.page_table_host.shape[1]
        entries = np.concatenate(
            [np.arange(len(u.pages), dtype=np.int64) + (u.row * width + u.start) for u in updates]
        )
        pages = np.concatenate([update.pages for update in updates])
        self.page_table_host.reshape(-1)[entries] = pages
        if not self._shares_memory:
            self._unsent.append(entries)

    def unsent_pages(self) -> tuple[Int64Array, Int32Array]:
        """Return the entries of the block tables that were not sent to the device yet.

        Returns:
            `[n]` int64 flat indices into `page_table`, and `[n]` int32 page numbers.
        """
        entries = np.concatenate([_NO_ENTRIES, *self._unsent])
        return entries, self.page_table_host.reshape(-1)[entries]

    def forget_unsent(self) -> None:
        """Mark all entries as sent: they were sent, or are part of the step being launched."""
        self._unsent.clear()

    @torch.inference_mode()
    def send_pages(self) -> None:
        """Send the entries of the block tables that changed to the device."""
        if self._unsent:
            index, values = to_device(self.device, *self.unsent_pages())
            self.page_table.view(-1).index_copy_(0, index, values)
            self.forget_unsent()

    def history(self) -> Tensor:
        """Return the generated tokens of all rows, `[max_rows + 1, max_len]` int64 on the device.

        The tensor is allocated when a request first uses a penalty.
        """
        if self._history is None:
            shape = (len(self.sampling), self._max_len)
            self._history = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return self._history
