"""Prompt chunks: the parts of prompts that one step computes."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.cache.manager import CacheManager
from runtime.cache.window_pages import WindowPages
from runtime.scheduler.request import PromptReport, Request
from runtime.scheduler.table import RequestTable
from runtime.step.step_plan import (
    EmbedSpan,
    HostCopies,
    Int32Array,
    Int64Array,
    ReportSpan,
    StepPlan,
    WindowUpdate,
)


@dataclass
class Chunk:
    """The tokens of one request that a step computes: a part of its prompt, or all of it.

    Attributes:
        start: position of the first token in the sequence.
        length: number of tokens.
        is_last: whether no known token of the request remains after this chunk.
        samples: whether an output token is sampled after this chunk.
        tokens: the chunk's token ids, `[length]` int32.
        spans: positions of the chunk for which an extra output, such as log-probabilities, was
            requested. Each entry has the request's report, the first position relative to `start`,
            and the token that follows each position.
        embeds: float32 bytes, embeddings that the model reads instead of the first `num_embeds`
            tokens.
    """

    request: Request
    start: int
    length: int
    is_last: bool
    samples: bool
    tokens: Int32Array
    spans: list[tuple[PromptReport, int, Int32Array]]
    embeds: bytes
    num_embeds: int


def add_spans(plan: StepPlan, chunks: list[Chunk]) -> list[tuple[Request, PromptReport]]:
    """Add to a plan which prompt positions have embeddings, and which have extra outputs.

    Returns:
        For each entry of `plan.report_spans`, its request and its report.
    """
    owners: list[tuple[Request, PromptReport]] = []
    first = 0
    for index, chunk in enumerate(chunks, plan.num_decodes):
        for report, begin, following in chunk.spans:
            plan.report_spans.append(ReportSpan(index, report.extra, begin, following))
            owners.append((chunk.request, report))
        if chunk.num_embeds:
            plan.embed_spans.append(EmbedSpan(first, chunk.num_embeds, chunk.embeds))
        first += chunk.length
    return owners


def advance_windows(
    windows: WindowPages | None, table: RequestTable, decode_rows: Int64Array, chunks: list[Chunk]
) -> WindowUpdate | None:
    """Assign pages of sliding-window layers to the tokens of a step.

    Returns the changes, for `StepPlan.windows`; `None` if the layers have no pages of their own or
    nothing has changed.
    """
    if windows is None:
        return None
    windows.leave_chunks()
    is_full = table.num_computed[decode_rows] >= table.window_end[decode_rows]
    for row in decode_rows[is_full].tolist():
        start = int(table.num_computed[row])
        table.window_end[row] = windows.advance(table.request(row).block_table, start, start + 1)
    for chunk in chunks:
        end = windows.advance(chunk.request.block_table, chunk.start, chunk.start + chunk.length)
        table.window_end[chunk.request.row] = end
    return windows.take_update()


def host_copies(
    cache: CacheManager, chunks: list[Chunk]
) -> tuple[HostCopies | None, HostCopies | None]:
    """Return the copies to and from host memory that the next step starts or waits for.

    Returns:
        The copies of KV pages, for `StepPlan.host`, and of recurrent states, for
        `StepPlan.host_states`; `None` where there are none.
    """
    pages, states = cache.tiers.pages, cache.tiers.states
    if pages is None:
        return None, None
    for chunk in chunks:
        cache.tiers.use(chunk.request.block_table)
    return pages.take_copies(), None if states is None else states.slots.take_copies()
