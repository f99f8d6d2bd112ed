"""Parts of prompts that a step computes."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.scheduler.request import PromptReport, Request
from runtime.step.step_plan import EmbedSpan, Int32Array, ReportSpan, StepPlan


@dataclass
class Chunk:
    """A request's part in a step that computes prompts.

    Building it is the last thing that can fail.

    Attributes:
        tokens: the chunk's token ids, `[length]`.
        spans: one entry for each report on positions of the chunk: the report, its first position
            relative to `start`, and the tokens that follow the positions.
        embeds: float32 bytes that replace the chunk's first `num_embeds` tokens.
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
    """Add the spans that are reported or given as embeddings; return the report spans' owners."""
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
