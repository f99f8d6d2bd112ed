"""The inputs of a graph for each step: a buffer of numbers in host memory, which the graph reads.

If each row decodes one token, the buffer names rows and lengths, and the device gathers the rest.
If a step has prompts, the buffer describes every token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.decode_step import decode_inputs
from runtime.executor.batch_rows import BatchRows
from runtime.executor.build_batch import FlatStep, as_batch, flatten
from runtime.executor.graph_buckets import Bucket
from runtime.models.attention.backend import AttentionBackend
from runtime.models.attention.forward_batch import ForwardBatch, KVCache, StateSteps
from runtime.step.step_plan import Int64Array, StepPlan

# Buffers are used in turn. Two steps may be in flight, so the buffer before theirs is no longer
# read.
NUM_BUFFERS = 4
# Counted in numbers of 8 bytes: 128 bytes are two cache lines of the host, and one read of a GPU.
_BUFFER_GRAIN = 16


class HostBuffers:
    """Buffers of pinned int64 numbers; each step of a runner uses the next buffer.

    Attributes:
        buffers: `[NUM_BUFFERS, size]`.
        numbers: each buffer, for the host to write.
        turn: index of the buffer of the latest step.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate the buffers for graphs on `device`, each of at least `size` numbers."""
        self.buffers = host_buffers(device, size)
        self.numbers: list[Int64Array] = list(self.buffers.numpy())
        self.turn = 0

    @property
    def following(self) -> int:
        """Index of the buffer that was read the longest ago; the next step uses it."""
        return (self.turn + 1) % NUM_BUFFERS

    def free(self) -> list[Int64Array]:
        """The buffers that no step in flight uses: all but the latest two."""
        return [self.numbers[(self.turn + i) % NUM_BUFFERS] for i in range(1, NUM_BUFFERS - 1)]


def host_buffers(device: torch.device, size: int) -> Tensor:
    """Return `[NUM_BUFFERS, at least size]` int64 zeros in host memory that `device` can read.

    For a GPU the memory is pinned. A buffer begins at the alignment that kernels are compiled for.
    It fills whole cache lines, so that device and host never write to the same cache line.
    """
    width = -(-size // _BUFFER_GRAIN) * _BUFFER_GRAIN
    return torch.zeros(NUM_BUFFERS, width, dtype=torch.int64, pin_memory=device.type == "cuda")


class GraphInputs(ABC):
    """The layout of a buffer: where each input of a bucket's graph is.

    Attributes:
        parts: slice of the buffer for each input, by name; `rows` and `wants_logits` are among
            them.
        padding: the content of a buffer without any sequence.
    """

    def __init__(
        self, bucket: Bucket, rows: BatchRows, page_size: int, **fields: tuple[int, int]
    ) -> None:
        """Lay out `fields`: for each its length and its padding value."""
        self._bucket = bucket
        self._rows = rows
        self._page_size = page_size
        named = {"rows": (bucket.num_seqs, rows.padding_row), "wants_logits": (1, 0), **fields}
        self.parts: dict[str, slice] = {}
        size = 0
        for name, (length, _) in named.items():
            self.parts[name] = slice(size, size + length)
            # Each part begins at a multiple of 16 bytes, as the compiled kernels require.
            size += length + length % 2
        self.padding: Int64Array = np.zeros(size, dtype=np.int64)
        for name, (_, value) in named.items():
            self.padding[self.parts[name]] = value

    def pad(self, buffer: Int64Array) -> None:
        """Fill a buffer with padding, so that it describes no sequence."""
        buffer[: len(self.padding)] = self.padding

    @abstractmethod
    def put(self, buffer: Int64Array, plan: StepPlan) -> None:
        """Write a step that fits the bucket to a padded buffer."""

    @abstractmethod
    def batch(
        self, numbers: Tensor, kv: list[KVCache], attention: AttentionBackend
    ) -> ForwardBatch:
        """Build the model's input from a buffer on the device; captured in the graph."""

    def _read(self, numbers: Tensor, *names: str) -> list[Tensor]:
        return [numbers[self.parts[name]] for name in names]

    def _write(self, buffer: Int64Array, name: str, numbers: NDArray[Any]) -> None:
        start = self.parts[name].start
        buffer[start : start + len(numbers)] = numbers


class DecodeGraphInputs(GraphInputs):
    """Rows that decode one token each; tokens and pages are on the device."""

    def __init__(
        self, bucket: Bucket, rows: BatchRows, page_size: int, padding_state: int | None = None
    ) -> None:
        """Lay out a buffer; `padding_state` is the slot that padding writes states to, if any."""
        length = bucket.num_seqs
        fields = {"seq_lens": (length, 1), "new_pages": (length, 0)}
        self._has_states = padding_state is not None
        if padding_state is not None:
            fields |= {"state_reads": (length, 0), "state_saves": (length, padding_state)}
        super().__init__(bucket, rows, page_size, **fields)
        # These bounds are the same in every step.
        self._indptr = torch.arange(length + 1, dtype=torch.int32, device=rows.device)

    def put(self, buffer: Int64Array, plan: StepPlan) -> None:
        """Write rows, lengths, and the pages that rows begin."""
        self._rows.grow(plan, self._page_size, is_sent=True)
        self._rows.send_pages()
        self._write(buffer, "rows", plan.rows)
        self._write(buffer, "seq_lens", plan.start_lens + 1)
        if plan.new_pages is not None:
            self._write(buffer, "new_pages", plan.new_pages)
        if plan.states is not None:
            self._write(buffer, "state_reads", plan.states.reads)
            self._write(buffer, "state_saves", plan.states.save_slots)

    def batch(
        self, numbers: Tensor, kv: list[KVCache], attention: AttentionBackend
    ) -> ForwardBatch:
        """Gather the inputs from the rows."""
        state, page_size = self._rows, self._page_size
        rows, lens, pages = self._read(numbers, "rows", "seq_lens", "new_pages")
        read = decode_inputs(
            rows, lens, pages, state.last_token, state.latest_input, state.page_table, page_size
        )
        if state.rope is not None:
            shifted = read.positions + state.rope.delta.index_select(0, rows)
            read = read._replace(positions=shifted)
        return ForwardBatch(
            **read._asdict(),
            qo_indptr=self._indptr,
            num_decodes=self._bucket.num_seqs,
            logits_indices=None,
            kv=kv,
            attention=attention,
            shares_prefixes=self._bucket.shares_prefixes,
            adapters=state.begin_adapters(rows),
            states=self._states(numbers) if self._has_states else None,
        )

    def _states(self, numbers: Tensor) -> StateSteps:
        reads, saves = self._read(numbers, "state_reads", "state_saves")
        seqs = torch.arange(len(reads), device=reads.device)
        return StateSteps(reads, self._indptr, seqs + 1, seqs, saves, is_decode=True)


class PromptGraphInputs(GraphInputs):
    """Prompt chunks, possibly beside decoding rows; page table updates travel with the step."""

    def __init__(self, bucket: Bucket, rows: BatchRows, page_size: int) -> None:
        """Lay out a buffer."""
        tokens, seqs = bucket.num_tokens, bucket.num_seqs
        self._has_decodes = bucket.kind == "mixed"
        # Page table entries that travel with the step: enough for the pages of its own tokens.
        self._num_entries = tokens // page_size + 2 * seqs
        super().__init__(
            bucket,
            rows,
            page_size,
            known_ids=(tokens, -1 if self._has_decodes else 0),
            token_rows=(tokens, rows.padding_row),
            positions=(tokens, 0),
            # A token with this slot is not written.
            slots=(tokens, -1),
            seq_lens=(seqs, 0),
            qo_indptr=(seqs + 1, 0),
            last=(seqs, 0),
            # The first page of the padding row, which is always 0: any write leaves it unchanged.
            entries=(self._num_entries, rows.padding_row * rows.page_table.shape[1]),
            pages=(self._num_entries, 0),
        )

    def put(self, buffer: Int64Array, plan: StepPlan) -> None:
        """Write the description of every token, and the pages that the device lacks."""
        rows = self._rows
        rows.grow(plan, self._page_size)
        flat = flatten(plan, rows, self._page_size)
        buffer[self.parts["qo_indptr"]] = plan.num_tokens
        for name, numbers in zip(FlatStep._fields, flat, strict=True):
            self._write(buffer, name, numbers)
        entries, pages = rows.unsent_pages()
        if len(entries) > self._num_entries:
            # More entries than fit, for example of a long cached prefix, are sent separately.
            rows.send_pages()
        else:
            self._write(buffer, "entries", entries)
            self._write(buffer, "pages", pages)

    def batch(
        self, numbers: Tensor, kv: list[KVCache], attention: AttentionBackend
    ) -> ForwardBatch:
        """Write the pages, then gather the inputs."""
        entries, pages = self._read(numbers, "entries", "pages")
        self._rows.page_table.view(-1).index_copy_(0, entries, pages.to(torch.int32))
        step, mixed = FlatStep(*self._read(numbers, *FlatStep._fields)), self._has_decodes
        # Only the device knows which rows decode.
        num_decodes = None if mixed else 0
        return as_batch(step, self._rows, kv, attention, has_decodes=mixed, num_decodes=num_decodes)


def inputs_of(
    bucket: Bucket, rows: BatchRows, page_size: int, padding_state: int | None = None
) -> GraphInputs:
    """Return the layout of a bucket's buffer.

    `padding_state` is the slot of recurrent states that padding writes; `None` if there are none.
    """
    if bucket.decodes:
        return DecodeGraphInputs(bucket, rows, page_size, padding_state)
    return PromptGraphInputs(bucket, rows, page_size)
