"""A `StepPlan` as bytes: what rank 0 sends the other ranks, one message a step.

Masks of grammars stay at rank 0: the others take its tokens, whatever they would sample themselves.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.executor.step_plan import (
    EmbedSpan,
    HiddenSpan,
    InputSpan,
    PageUpdate,
    RowJoin,
    StepPlan,
)
from runtime.ipc.messages import LogprobSpec
from runtime.requests.sampling_params import SamplingParams


class JoinMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `RowJoin`; `output_ids` are int32 bytes."""

    row: int
    sampling: SamplingParams
    num_prompt: int
    stop_ids: list[int]
    output_ids: bytes
    # All ranks take the same road through a step: what is reported decides it too.
    logprobs: LogprobSpec | None = None
    has_grammar: bool = False
    wants_hidden: bool = False


class SpanMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An `InputSpan`; `targets` are int32 bytes."""

    index: int
    offset: int
    targets: bytes


class PageMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `PageUpdate`; `pages` are int32 bytes."""

    row: int
    start: int
    pages: bytes


class HiddenMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `HiddenSpan`."""

    index: int
    offset: int
    length: int


class EmbedMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An `EmbedSpan`; `values` are float32 bytes, row by row."""

    first: int
    num_rows: int
    values: bytes


class PlanMessage(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """A `StepPlan`; its arrays are the bytes of their numbers."""

    rows: bytes
    num_decodes: int
    start_lens: bytes
    query_lens: bytes
    chunk_tokens: bytes
    samples: bytes
    joins: list[JoinMessage]
    page_updates: list[PageMessage]
    input_spans: list[SpanMessage]
    hidden_spans: list[HiddenMessage] = []
    embed_spans: list[EmbedMessage] = []
    new_pages: bytes = b""


def to_message(plan: StepPlan) -> PlanMessage:
    """Copy the plan's numbers."""
    return PlanMessage(
        rows=plan.rows.tobytes(),
        num_decodes=int(plan.num_decodes),
        start_lens=plan.start_lens.tobytes(),
        query_lens=plan.query_lens.tobytes(),
        chunk_tokens=plan.chunk_tokens.tobytes(),
        samples=plan.samples.tobytes(),
        joins=[
            JoinMessage(
                int(join.row),
                join.sampling,
                join.num_prompt,
                join.stop_ids,
                join.output_ids.tobytes(),
                join.logprobs,
                join.has_grammar,
                join.wants_hidden,
            )
            for join in plan.joins
        ],
        page_updates=[
            PageMessage(int(update.row), int(update.start), update.pages.tobytes())
            for update in plan.page_updates
        ],
        input_spans=[
            SpanMessage(int(span.index), int(span.offset), span.targets.tobytes())
            for span in plan.input_spans
        ],
        hidden_spans=[
            HiddenMessage(int(span.index), int(span.offset), int(span.length))
            for span in plan.hidden_spans
        ],
        embed_spans=[
            EmbedMessage(int(span.first), len(span.values), span.values.tobytes())
            for span in plan.embed_spans
        ],
        new_pages=b"" if plan.new_pages is None else plan.new_pages.tobytes(),
    )


def _array(data: bytes, dtype: type[np.generic]) -> NDArray[Any]:
    # A copy: torch takes no view of numbers that cannot be written.
    return np.frombuffer(bytearray(data), dtype=dtype)


def from_message(message: PlanMessage) -> StepPlan:
    """The plan that the message was made of."""
    return StepPlan(
        rows=_array(message.rows, np.int64),
        num_decodes=message.num_decodes,
        start_lens=_array(message.start_lens, np.int64),
        query_lens=_array(message.query_lens, np.int64),
        chunk_tokens=_array(message.chunk_tokens, np.int32),
        samples=_array(message.samples, np.bool_),
        joins=[
            RowJoin(
                join.row,
                join.sampling,
                join.num_prompt,
                join.stop_ids,
                _array(join.output_ids, np.int32),
                join.logprobs,
                join.has_grammar,
                join.wants_hidden,
            )
            for join in message.joins
        ],
        page_updates=[
            PageUpdate(update.row, update.start, _array(update.pages, np.int32))
            for update in message.page_updates
        ],
        input_spans=[
            InputSpan(span.index, span.offset, _array(span.targets, np.int32))
            for span in message.input_spans
        ],
        hidden_spans=[
            HiddenSpan(span.index, span.offset, span.length) for span in message.hidden_spans
        ],
        embed_spans=[
            EmbedSpan(span.first, _array(span.values, np.float32).reshape(span.num_rows, -1))
            for span in message.embed_spans
        ],
        new_pages=_array(message.new_pages, np.int32) if message.new_pages else None,
    )
