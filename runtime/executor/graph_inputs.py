"""Describes each step to its CUDA graph in a buffer of integers in host memory.

If each sequence decodes one token, the buffer has batch rows and lengths, and the device gathers
the other inputs. If a step has prompts, the buffer describes every token.
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

# The buffers are used in turn. At most two steps are in flight, so the buffers before theirs are no
# longer read.
NUM_BUFFERS = 4
# Number of int64 values that a buffer's size is a multiple of. 128 bytes are two cache lines of the
# host, and one read of a GPU.
_BUFFER_GRAIN = 16


class HostBuffers:
    """Several buffers of int64 values in host memory; each step uses the next one.

    Attributes:
        buffers: `[NUM_BUFFERS, size]` int64, pinned for a GPU.
        numbers: each buffer as an array that the host writes.
        turn: index of the buffer that the latest step uses.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate buffers of at least `size` values each, for graphs on `device`."""
        self.buffers = host_buffers(device, size)
        self.numbers: list[Int64Array] = list(self.buffers.numpy())
        self.turn = 0

    @property
    def following(self) -> int:
        """Index of the buffer for the next step: the one that was used the longest ago."""
        return (self.turn + 1) % NUM_BUFFERS

    def free(self) -> list[Int64Array]:
        """Return the buffers that no step in flight uses: all but the latest two."""
        return [self.numbers[(self.turn + i) % NUM_BUFFERS] for i in range(1, NUM_BUFFERS - 1)]


def host_buffers(device: torch.device, size: int) -> Tensor:
    """Return `[NUM_BUFFERS, at least size]` int64 zeros in host memory that `device` can read.

    For a GPU the memory is pinned. Each buffer fills whole cache lines, so the device and the host
    never write to the same cache line. This also gives the alignment that kernels need.
    """
    width = -(-size // _BUFFER_GRAIN) * _BUFFER_GRAIN
    return torch.zeros(NUM_BUFFERS, width, dtype=torch.int64, pin_memory=device.type == "cuda")


class GraphInputs(ABC):
    """The layout of a buffer: which of its values are which input of a bucket's graph.

    Attributes:
        parts: slice of the buffer for each input, by name. Each layout has `rows` and
            `wants_logits`.
        padding: content of a buffer that describes no sequence.
    """

    def __init__(
        self, bucket: Bucket, rows: BatchRows, page_size: int, **fields: tuple[int, int]
    ) -> None:
        """Create the layout.

        Args:
            bucket: the bucket whose graph reads the buffer.
            rows: the rows of the running batch.
            page_size: number of tokens per page.
            fields: the length and the padding value of each input.
        """
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
        """Fill a buffer with the padding values, so that it describes no sequence."""
        buffer[: len(self.padding)] = self.padding

    @abstractmethod
    def put(self, buffer: Int64Array, plan: StepPlan) -> None:
        """Write a step into `buffer`, which `pad` has filled. The step must fit the bucket."""

    @abstractmethod
    def batch(
        self, numbers: Tensor, kv: list[KVCache], attention: AttentionBackend
    ) -> ForwardBatch:
        """Build the model's input from `numbers`, the buffer's copy on the device.

        The graph captures this work, too.
        """

    def _read(self, numbers: Tensor, *names: str) -> list[Tensor]:
        return [numbers[self.parts[name]] for name in names]

    def _write(self, buffer: Int64Array, name: str, numbers: NDArray[Any]) -> None:
        start = self.parts[name].start
        buffer[start : start + len(numbers)] = numbers


class DecodeGraphInputs(GraphInputs):
    """The layout for sequences that decode one token each; their tokens are on the device."""

    def __init__(
        self, bucket: Bucket, rows: BatchRows, page_size: int, padding_state: int | None = None
    ) -> None:
        """Create the layout.

        `padding_state` is the slot to which padding writes recurrent states; `None` if the model
        has none.
        """
        length = bucket.num_seqs
        fields = {"seq_lens": (length, 1), "new_pages": (length, 0)}
        self._has_states = padding_state is not None
        if padding_state is not None:
            fields |= {"state_reads": (length, 0), "state_saves": (length, padding_state)}
        super().__init__(bucket, rows, page_size, **fields)
        # Bounds of the sequences' tokens; they are the same in every step.
        self._indptr = torch.arange(length + 1, dtype=torch.int32, device=rows.device)

    def put(self, buffer: Int64Array, plan: StepPlan) -> None:
        """Write batch rows, lengths, and the new pages of these rows."""
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
        """Gather the tokens, positions and block tables of the rows."""
        state, page_size = self._rows, self._page_size
        rows, lens, pages = self._read(numbers, "rows", "seq_lens", "new_pages")
        read = decode_inputs(
            rows, lens, pages, state.last_token, state.latest_input, state.page_table, page_size
        )
        if state.rope is not None:
            shifted = read.positions + state.rope.delta.index_select(0, rows)
            read = read._replace(positions=shifted)
        windows = state.windows
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
            window=None if windows is None else windows.view(read.page_table, read.slots),
        )

    def _states(self, numbers: Tensor) -> StateSteps:
        reads, saves = self._read(numbers, "state_reads", "state_saves")
        seqs = torch.arange(len(reads), device=reads.device)
        return StateSteps(reads, self._indptr, seqs + 1, seqs, saves, is_decode=True)


class PromptGraphInputs(GraphInputs):
    """The layout for prompt chunks, with or without decoding sequences.

    Changes of block tables are part of the buffer.
    """

    def __init__(self, bucket: Bucket, rows: BatchRows, page_size: int) -> None:
        """Create the layout."""
        tokens, seqs = bucket.num_tokens, bucket.num_seqs
        self._has_decodes = bucket.kind == "mixed"
        # Number of changed block table entries that fit into the buffer: enough for the pages of
        # the step's own tokens.
        self._num_entries = tokens // page_size + 2 * seqs
        super().__init__(
            bucket,
            rows,
            page_size,
            known_ids=(tokens, -1 if self._has_decodes else 0),
            token_rows=(tokens, rows.padding_row),
            positions=(tokens, 0),
            # The key and value of a token with this slot are not written.
            slots=(tokens, -1),
            seq_lens=(seqs, 0),
            qo_indptr=(seqs + 1, 0),
            last=(seqs, 0),
            # Unused entries write a 0 to the first page of the padding row, which is always 0.
            entries=(self._num_entries, rows.padding_row * rows.page_table.shape[1]),
            pages=(self._num_entries, 0),
        )

    def put(self, buffer: Int64Array, plan: StepPlan) -> None:
        """Write the description of every token, and the changed entries of the block tables."""
        rows = self._rows
        rows.grow(plan, self._page_size)
        flat = flatten(plan, rows, self._page_size)
        buffer[self.parts["qo_indptr"]] = plan.num_tokens
        for name, numbers in zip(FlatStep._fields, flat, strict=True):
            self._write(buffer, name, numbers)
        entries, pages = rows.unsent_pages()
        if len(entries) > self._num_entries:
            # More entries changed, for example because of a long cached prefix, so they are sent
            # separately.
            rows.send_pages()
        else:
            self._write(buffer, "entries", entries)
            self._write(buffer, "pages", pages)

    def batch(
        self, numbers: Tensor, kv: list[KVCache], attention: AttentionBackend
    ) -> ForwardBatch:
        """Write the changed entries to the block tables, then gather the inputs."""
        entries, pages = self._read(numbers, "entries", "pages")
        self._rows.page_table.view(-1).index_copy_(0, entries, pages.to(torch.int32))
        step, mixed = FlatStep(*self._read(numbers, *FlatStep._fields)), self._has_decodes
        # The number of decoding sequences differs between steps, so only the device knows it.
        num_decodes = None if mixed else 0
        return as_batch(step, self._rows, kv, attention, has_decodes=mixed, num_decodes=num_decodes)


def inputs_of(
    bucket: Bucket, rows: BatchRows, page_size: int, padding_state: int | None = None
) -> GraphInputs:
    """Return the layout of the buffer for a bucket's graph.

    Args:
        bucket: the bucket.
        rows: the rows of the running batch.
        page_size: number of tokens per page.
        padding_state: slot to which padding writes recurrent states; `None` if there are none.
    """
    if bucket.decodes:
        return DecodeGraphInputs(bucket, rows, page_size, padding_state)
    return PromptGraphInputs(bucket, rows, page_size)
