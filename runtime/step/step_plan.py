"""The data that scheduler and executor exchange: the plan of a step, and its result.

A step is one forward pass for a batch of sequences. Each running request has a row in the tables of
scheduler and executor. The plan is also sent to the other ranks' processes;
`runtime.ipc.array_codec` encodes its arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
    """An image in a request's prompt; the tokens' RoPE positions depend on its place and size.

    Attributes:
        start: position in the prompt of the image's first token.
        num_tokens: number of the image's tokens, which are consecutive.
        size: `(channels, height, width)` of the image's pixels.
    """

    start: int
    num_tokens: int
    size: tuple[int, int, int]


class RowJoin(_Part):
    """A request that takes a row of the running batch, with the data to write to the row.

    Attributes:
        row: index of the row.
        spec: the request's data that the executor needs, such as sampling parameters. Every rank
            gets it, because every rank takes the same path through a step.
        num_prompt: number of prompt tokens.
        output_ids: int32, output tokens from before the request was put back into the queue. The
            penalties count them.
        has_grammar: whether steps may have grammar masks for the row.
        images: images of the prompt, in order.
        adapter_slot: slot of the request's LoRA adapter; -1 without an adapter.
    """

    row: int
    spec: RowSpec
    num_prompt: int
    output_ids: Int32Array
    has_grammar: bool = False
    images: list[RowImage] = []
    adapter_slot: int = -1


class AdapterCopy(_Part):
    """A LoRA adapter that is copied from host memory into a slot on the device.

    Attributes:
        slot: index of the slot.
        adapter_id: id of the adapter, which is in host memory.
    """

    slot: int
    adapter_id: int


class PageUpdate(_Part):
    """New entries of a row's block table.

    Attributes:
        row: index of the row.
        start: index of the first new entry.
        pages: int32, page numbers of the new entries.
    """

    row: int
    start: int
    pages: Int32Array


class WindowUpdate(_Part):
    """New entries of the map from pages of full-attention layers to pages of windowed layers.

    Attributes:
        pages: `[n]` int32, pages of full-attention layers, each once.
        window_pages: `[n]` int32, the sliding-window layers' pages for the same tokens; 0 for none.
    """

    pages: Int32Array
    window_pages: Int32Array


class HostRun(NamedTuple):
    """Copies of pages in one direction, to host memory or from it; no two write the same page."""

    to_host: bool
    pages: Int32Array
    host_pages: Int32Array


class HostCopies(_Part):
    """Copies between pages on the device and in host memory; the result is as if made in order.

    Attributes:
        ticket: number of these copies, which grows from plan to plan.
        needed: the step and its own copies wait for all copies with a ticket up to this number.
        pages: `[n]`, pages on the device.
        host_pages: `[n]`, pages in host memory.
        to_host: `[n]`, whether each copy goes to host memory or from it.
    """

    ticket: int
    needed: int
    pages: Int32Array
    host_pages: Int32Array
    to_host: BoolArray

    def split(self) -> tuple[list[HostRun], list[HostRun]]:
        """Split the copies into two lists of runs (consecutive copies in one direction).

        Returns:
            The runs that must end before the step computes, in order; and the runs that may be
            executed while this and later steps compute.
        """
        if self.needed >= self.ticket:
            return list(self._runs(np.ones(len(self.pages), dtype=bool))), []
        # A page is saved before the step computes, because the step may write it. A page that is
        # then filled from host memory is not written by this step; the later step that uses it
        # waits for the copies.
        first = self.to_host & ~np.isin(self.pages, self.pages[~self.to_host])
        return list(self._runs(first)), list(self._runs(~first))

    def _runs(self, chosen: BoolArray) -> Iterator[HostRun]:
        pages, host_pages = self.pages[chosen], self.host_pages[chosen]
        directions = self.to_host[chosen]
        turns = (np.flatnonzero(np.diff(directions)) + 1).tolist()
        for start, end in itertools.pairwise([0, *turns, len(pages)]):
            if start == end:
                return
            to_host, part = bool(directions[start]), slice(start, end)
            written = (host_pages if to_host else pages)[part]
            # Of several copies to the same page, only the last is kept.
            last = end - 1 - np.unique(written[::-1], return_index=True)[1]
            yield HostRun(to_host, pages[last], host_pages[last])


class StateMoves(_Part):
    """The slots from which a step reads recurrent states, and the slots to which it saves states.

    A step may save the states of a sequence several times: after some of the sequence's new tokens,
    for snapshots, and after the last new token. It never writes to the slot that the sequence
    reads, so a failed step can be computed again.

    Attributes:
        reads: `[num_seqs]` int32, slot of the states before each sequence's new tokens. Slot 0 has
            zeros, from which a sequence begins.
        save_seqs: `[num_saves]` int32, index of the sequence whose states are saved, ascending.
        save_lens: `[num_saves]` int32, number of the sequence's new tokens before the save;
            ascending for each sequence.
        save_slots: `[num_saves]` int32, the slot to which the states are saved.
    """

    reads: Int32Array
    save_seqs: Int32Array
    save_lens: Int32Array
    save_slots: Int32Array

    def only(self, index: int) -> StateMoves:
        """Return the reads and saves of one sequence, renumbered as sequence 0."""
        (of_one,) = np.nonzero(self.save_seqs == index)
        zeros = np.zeros(len(of_one), dtype=np.int32)
        one = self.reads[index : index + 1]
        return StateMoves(one, zeros, self.save_lens[of_one], self.save_slots[of_one])


class ReportSpan(_Part):
    """Consecutive prompt positions whose extra output, such as log-probabilities, is reported.

    Attributes:
        index: index of the sequence in the step.
        extra: name of the extra output.
        offset: index of the first position in the sequence's chunk.
        next_tokens: int32, the token that follows each position.
    """

    index: int
    extra: str
    offset: int
    next_tokens: Int32Array


class EmbedSpan(_Part):
    """Consecutive prompt positions at which the model reads an embedding instead of a token.

    Attributes:
        first: index of the first position in `StepPlan.chunk_tokens`.
        length: number of positions.
        values: bytes of the embeddings, `[length, hidden_size]` float32.
    """

    first: int
    length: int
    values: bytes


class ImageSpan(_Part):
    """Consecutive prompt positions at which the model reads vectors of an image, not tokens.

    Attributes:
        first: index of the first position in `StepPlan.chunk_tokens`.
        length: number of positions.
        offset: index of the first position's vector among the vectors of the image.
        digest: hash that identifies the image.
    """

    first: int
    length: int
    offset: int
    digest: bytes


@dataclass
class TokenMasks:
    """The grammar masks of a step: which tokens each constrained sample may be.

    Attributes:
        sample_indices: `[num_masks]` int64, indices in `StepPlan.sample_rows`, ascending.
        words: `[num_masks, ceil(vocab_size / 32)]` int32; each set bit allows a token.
    """

    sample_indices: Int64Array
    words: Int32Array

    def only(self, sample_index: int) -> TokenMasks | None:
        """Return the mask of one sample, renumbered as sample 0; `None` if it has no mask."""
        found = np.flatnonzero(self.sample_indices == sample_index)
        return TokenMasks(np.zeros(1, dtype=np.int64), self.words[found]) if len(found) else None

    def make(self) -> TokenMasks:
        """Return these masks, so that they can be used as a `MaskSource`."""
        return self


class MaskSource(Protocol):
    """Makes the grammar masks of one step when the executor needs them.

    The executor calls `make` after it has queued the work up to the logits on the device. So the
    host makes the masks while the device computes.
    """

    def make(self) -> TokenMasks | None:
        """Return the masks; `None` if no sample is constrained.

        They are made at the first call only, even if a failed step is tried again.
        """


class StepPlan(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The work of one step: first sequences that decode, then prompt chunks.

    A sequence that decodes has one or more new tokens. Its first new token is on the device, where
    it was sampled. Further ones were forced by a grammar and are in `chunk_tokens`. Sequences with
    one new token come first.

    Attributes:
        rows: `[num_seqs]` int64, row of each sequence in the running batch.
        num_decodes: number of sequences that decode.
        start_lens: `[num_seqs]` int64, number of tokens whose keys and values are in the cache.
        query_lens: `[num_seqs]` int64, number of new tokens.
        chunk_tokens: int32, all new tokens that are not on the device, concatenated.
        samples: `[num_seqs]` bool, whether a token is sampled for the sequence.
        joins: requests that take a row of the running batch before the step.
        page_updates: changed entries of block tables, written before the step.
        new_pages: `[num_decodes]` int32, the page of each decoding sequence whose new token begins
            a page; 0 for the others. `None` if no sequence begins a page.
        report_spans: prompt positions whose extra outputs this step reports, at most one span for
            each sequence and extra output.
        embed_spans: parts of `chunk_tokens` that are embeddings, ascending.
        image_spans: parts of `chunk_tokens` that stand for images, ascending.
        image_drops: digests of images whose vectors are dropped before this step.
        image_loads: images whose vectors this step computes, each once. They are kept.
        adapter_copies: LoRA adapters that are copied to the device, for this step or a later one.
        states: where recurrent states are read and saved; `None` if the model has none.
        decode_tokens: `[num_decodes]` int32, the first new token of each decoding sequence, for
            ranks that did not sample it; `None` if every rank has it.
        windows: changed pages of sliding-window layers, written before the step; `None` for none.
        host: copies between pages and host memory; `None` for none.
        host_states: the same for slots of recurrent states; slot numbers take the place of page
            numbers.
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
    windows: WindowUpdate | None = None
    host: HostCopies | None = None
    host_states: HostCopies | None = None

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of all sequences."""
        return self.num_decodes + len(self.chunk_tokens)

    @property
    def known_ids(self) -> Int64Array:
        """`[num_tokens]` int64: the id of each new token, -1 for those that are on the device."""
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
        """Rows for which a token is sampled, in order."""
        if self.num_decodes == len(self.rows):
            return self.rows
        return self.rows[self.samples]

    def only(self, index: int) -> StepPlan:
        """Return a plan with only one of the sequences, to find the sequence that fails."""
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
            # The drops are repeated for each sequence, because the failed step may not have made
            # them. Images that this step computes are not dropped: the step of another sequence may
            # have computed them already, and computing them again overwrites them.
            image_drops=[digest for digest in self.image_drops if digest not in loaded],
            image_loads=[image for image in self.image_loads if image.digest in wanted],
            # The copies are repeated, too. An adapter that is in its slot is not copied again.
            adapter_copies=self.adapter_copies,
            states=None if self.states is None else self.states.only(index),
        )


class Reported(NamedTuple):
    """An extra output, such as log-probabilities, for consecutive positions of one sequence.

    Attributes:
        extra: name of the extra output.
        num_positions: number of positions.
        data: the values, in the extra output's own encoding.
    """

    extra: str
    num_positions: int
    data: bytes


@dataclass
class StepResult:
    """The result of a step.

    Attributes:
        token_ids: `[num_samples]` int32, one token for each row of `StepPlan.sample_rows`.
        failed: for each row whose sequence could not be computed, the error text. Its entry in
            `token_ids` has no meaning.
        nan_rows: rows of `failed` whose logits contained NaN.
        was_retried: whether the step failed and each sequence was computed alone. If so, images
            that only a later step reads were not computed.
        outputs: for each row with extra outputs, those about the row's new token.
        inputs: for each row and name of an extra output, the output about the prompt positions of
            the step's `report_spans`.
    """

    token_ids: Int32Array
    failed: dict[int, str] = field(default_factory=dict)
    nan_rows: list[int] = field(default_factory=list)
    was_retried: bool = False
    outputs: dict[int, list[Reported]] = field(default_factory=dict)
    inputs: dict[tuple[int, str], Reported] = field(default_factory=dict)
