"""The interface between scheduler and executor: plain data in both directions.

A plan crosses processes unchanged: `runtime.ipc.array_codec` writes its arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from runtime.requests.image_input import PreparedImage
from runtime.requests.request_spec import RowSpec

Int64Array = NDArray[np.int64]
Int32Array = NDArray[np.int32]
BoolArray = NDArray[np.bool_]


class _Part(msgspec.Struct, array_like=True, gc=False):
    pass


class RowImage(_Part):
    """An image in a row's prompt, for the positions of the tokens in it and after it.

    Attributes:
        start: index in the prompt of its first token.
        num_tokens: number of consecutive tokens from there.
        size: `(channels, height, width)` of its pixels.
    """

    start: int
    num_tokens: int
    size: tuple[int, int, int]


class RowJoin(_Part):
    """A request takes a row; the request's data is written to the row once.

    Attributes:
        spec: the request's data for its row, made by the service. Every rank gets the data, because
            every rank takes the same path through a step.
        output_ids: tokens generated before a retraction, for the penalties.
        has_grammar: whether steps may send masks for the row.
        images: images of the prompt, in order.
        adapter_slot: slot of the request's adapter; -1 without an adapter.
    """

    row: int
    spec: RowSpec
    num_prompt: int
    output_ids: Int32Array
    has_grammar: bool = False
    images: list[RowImage] = []
    adapter_slot: int = -1


class AdapterCopy(_Part):
    """An adapter that is copied into a slot of the device.

    Attributes:
        slot: index of the slot.
        adapter_id: id of a loaded adapter.
    """

    slot: int
    adapter_id: int


class PageUpdate(_Part):
    """New pages for a row's table, from entry `start` on."""

    row: int
    start: int
    pages: Int32Array


class StateMoves(_Part):
    """The slots from which a step reads recurrent states, and the slots to which it saves states.

    No slot that a sequence reads is written for this sequence, so a step may be computed twice. One
    step may save a sequence's states several times: after some of the sequence's new tokens, for
    snapshots, and after the last new token.

    Attributes:
        reads: `[num_seqs]`, slot of each sequence's states before its new tokens; slot 0 has zeros.
        save_seqs: `[num_saves]`, index of the sequence whose states are saved, ascending.
        save_lens: `[num_saves]`, number of the sequence's new tokens before the save; ascending for
            each sequence.
        save_slots: `[num_saves]`, slot that is written.
    """

    reads: Int32Array
    save_seqs: Int32Array
    save_lens: Int32Array
    save_slots: Int32Array

    def only(self, index: int) -> StateMoves:
        """Return the reads and saves of one sequence, which gets index 0."""
        (of_one,) = np.nonzero(self.save_seqs == index)
        zeros = np.zeros(len(of_one), dtype=np.int32)
        one = self.reads[index : index + 1]
        return StateMoves(one, zeros, self.save_lens[of_one], self.save_slots[of_one])


class ReportSpan(_Part):
    """Consecutive prompt positions about which an extra reports something.

    Attributes:
        index: index of the sequence in the step.
        extra: name of the extra.
        offset: index of the first position in the sequence's chunk.
        next_tokens: int32, the token that follows each position.
    """

    index: int
    extra: str
    offset: int
    next_tokens: Int32Array


class EmbedSpan(_Part):
    """Consecutive prompt positions that have an embedding instead of a token.

    Attributes:
        first: index of the first one in `StepPlan.chunk_tokens`.
        length: number of positions.
        values: float32 bytes, `[length, hidden_size]`.
    """

    first: int
    length: int
    values: bytes


class ImageSpan(_Part):
    """Consecutive prompt positions that have vectors of an image instead of tokens.

    Attributes:
        first: index of the first one in `StepPlan.chunk_tokens`.
        length: number of positions.
        offset: index of the first position's vector among the image's vectors.
        digest: digest of the image.
    """

    first: int
    length: int
    offset: int
    digest: bytes


@dataclass
class TokenMasks:
    """For each sequence whose output follows a grammar, the tokens that may be sampled.

    Attributes:
        sample_indices: `[num_masks]` int64, indices in `StepPlan.sample_rows`, ascending.
        words: `[num_masks, ceil(vocab_size / 32)]` int32; a set bit allows its token.
    """

    sample_indices: Int64Array
    words: Int32Array

    def only(self, sample_index: int) -> TokenMasks | None:
        """Return the mask of one sample, with index 0; `None` if the sample has no mask."""
        found = np.flatnonzero(self.sample_indices == sample_index)
        return TokenMasks(np.zeros(1, dtype=np.int64), self.words[found]) if len(found) else None

    def make(self) -> TokenMasks:
        """Return these masks: a `MaskSource` whose masks exist already."""
        return self


class MaskSource(Protocol):
    """The masks of one step, which travel beside its plan.

    The executor calls `make` when the work up to the logits is queued on the device, so making the
    masks overlaps with it.
    """

    def make(self) -> TokenMasks | None:
        """Return the masks.

        The masks are made once, at the first call, even if a failing step is retried.
        """


class StepPlan(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The work of one step: decoding sequences first, then prompt chunks.

    A decoding sequence has one or more new tokens. The first is on the device; the others are known
    already and are in `chunk_tokens`. Sequences with one token come first.

    Attributes:
        rows: `[num_seqs]` int64.
        num_decodes: the first `num_decodes` sequences decode; their first token is on the device.
        start_lens: `[num_seqs]` int64, number of keys and values that each sequence already has.
        query_lens: `[num_seqs]` int64, new tokens of each sequence.
        chunk_tokens: int32, all tokens that are not on the device, concatenated.
        samples: `[num_seqs]` bool, sequences for which a token is sampled.
        joins, page_updates: changes of rows, applied before the step.
        new_pages: `[num_decodes]` int32, the first page that each decoding sequence's tokens begin,
            0 for none; `None` if the step begins no such page.
        report_spans: prompt positions to report, at most one span per sequence and extra.
        embed_spans: parts of `chunk_tokens` that are embeddings, ascending.
        image_spans: parts of `chunk_tokens` that stand for images, ascending.
        image_drops: digests of images whose vectors are dropped before this step.
        image_loads: images whose vectors this step computes, each once; they are kept afterwards.
        adapter_copies: adapters that come to the device, for this step or a later one.
        states: where recurrent states are read and written; `None` if the model has none.
        decode_tokens: `[num_decodes]` int32, the first token of each decoding sequence, for ranks
            that did not sample it; `None` if every rank did.
    """

    rows: Int64Array
    num_decodes: int
    start_lens: Int64Array
    query_lens: Int64Array
    chunk_tokens: Int32Array
    samples: BoolArray
    joins: list[RowJoin] = []
    page_updates: list[PageUpdate] = []
    new_pages: Int32Array | None = None
    report_spans: list[ReportSpan] = []
    embed_spans: list[EmbedSpan] = []
    image_spans: list[ImageSpan] = []
    image_drops: list[bytes] = []
    image_loads: list[PreparedImage] = []
    adapter_copies: list[AdapterCopy] = []
    states: StateMoves | None = None
    decode_tokens: Int32Array | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return self.num_decodes + len(self.chunk_tokens)

    @property
    def known_ids(self) -> Int64Array:
        """`[num_tokens]` int64: each token in order, -1 for one that is on the device."""
        known = self.chunk_tokens.astype(np.int64)
        if not self.num_decodes:
            return known
        ids = np.full(self.num_tokens, -1, dtype=np.int64)
        is_known = np.ones(len(ids), dtype=bool)
        is_known[(np.cumsum(self.query_lens) - self.query_lens)[: self.num_decodes]] = False
        ids[is_known] = known
        return ids

    @property
    def sample_rows(self) -> Int64Array:
        """Rows that get a token, in order."""
        if self.num_decodes == len(self.rows):
            return self.rows
        return self.rows[self.samples]

    def only(self, index: int) -> StepPlan:
        """Return the step reduced to one of its sequences, to find the sequence that fails."""
        num_known = self.query_lens - (np.arange(len(self.rows)) < self.num_decodes)
        first = int(num_known[:index].sum())
        last = first + int(num_known[index])
        one = slice(index, index + 1)
        image_spans = [
            replace(span, first=span.first - first)
            for span in self.image_spans
            if first <= span.first < last
        ]
        wanted = {span.digest for span in image_spans}
        loaded = {image.digest for image in self.image_loads}
        return StepPlan(
            rows=self.rows[one],
            num_decodes=int(index < self.num_decodes),
            start_lens=self.start_lens[one],
            query_lens=self.query_lens[one],
            chunk_tokens=self.chunk_tokens[first:last],
            samples=self.samples[one],
            new_pages=(
                self.new_pages[one]
                if self.new_pages is not None and index < self.num_decodes
                else None
            ),
            report_spans=[
                replace(span, index=0) for span in self.report_spans if span.index == index
            ],
            embed_spans=[
                replace(span, first=span.first - first)
                for span in self.embed_spans
                if first <= span.first < last
            ],
            image_spans=image_spans,
            # Each sequence's step repeats the drops: the failed step may have made none. Images
            # that this sequence computes again are overwritten; another sequence may have computed
            # them already.
            image_drops=[digest for digest in self.image_drops if digest not in loaded],
            image_loads=[image for image in self.image_loads if image.digest in wanted],
            # As for images; what came to the device is not copied again.
            adapter_copies=self.adapter_copies,
            states=None if self.states is None else self.states.only(index),
        )


class Reported(NamedTuple):
    """A report of an extra about consecutive positions of one sequence."""

    extra: str
    num_positions: int
    data: bytes


@dataclass
class StepResult:
    """The outcome of a step.

    Attributes:
        token_ids: `[num_samples]` int32, one per row of `StepPlan.sample_rows`.
        failed: row to error text, for sequences that could not be computed; their entries of
            `token_ids` are meaningless.
        nan_rows: rows of `failed` whose logits contained NaN.
        was_retried: whether the step failed and each sequence was tried alone. If so, images that
            no sequence reads were not computed.
        outputs: by row, reports about the row's new token, for rows with extras.
        inputs: by row and extra, reports about the step's span of the row's prompt.
    """

    token_ids: Int32Array
    failed: dict[int, str] = field(default_factory=dict)
    nan_rows: list[int] = field(default_factory=list)
    was_retried: bool = False
    outputs: dict[int, list[Reported]] = field(default_factory=dict)
    inputs: dict[tuple[int, str], Reported] = field(default_factory=dict)
