"""Token counts of an answer, in OpenAI's `usage` with SGLang's keys beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from runtime.client.generation_stream import GenerationChunk
from runtime.service.cache_break import CacheBreak


@dataclass
class TokenCount:
    """Counts of one choice, kept while it grows.

    Attributes:
        close_id: the token that ends reasoning; `None` when it cannot be recognised.
        reasoning: tokens up to and including that one, or all so far.
        has_reasoned: whether there was reasoning at all; else nothing counts as such.
        cache_break: where the prompt left what was cached, if that was asked for.
    """

    close_id: int | None = None
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    has_reasoned: bool = False
    cache_break: CacheBreak | None = None
    reasoning_is_over: bool = False

    def add(self, chunk: GenerationChunk) -> None:
        """Count a chunk."""
        self.prompt, self.cached = chunk.prompt_tokens, chunk.cached_tokens
        if self.close_id is not None and not self.reasoning_is_over:
            self.reasoning = self.completion + len(chunk.token_ids)
            if self.close_id in chunk.token_ids:
                self.reasoning = self.completion + chunk.token_ids.index(self.close_id) + 1
                self.reasoning_is_over = True
        self.completion += len(chunk.token_ids)


def break_of(count: TokenCount) -> dict[str, CacheBreak]:
    """What is told of the cache beside counts."""
    return {} if count.cache_break is None else {"cache_break": count.cache_break}


def usage_of(
    counts: Iterable[TokenCount], *, report_cache: bool, samples_per_prompt: int = 1
) -> dict[str, Any]:
    """Sum up choices; a prompt that several choices share is counted once.

    Args:
        counts: one per choice, those of one prompt next to each other.
        report_cache: whether cached prompt tokens are told.
        samples_per_prompt: choices of each prompt.
    """
    choices = list(counts)
    firsts = choices[::samples_per_prompt]
    prompt = sum(count.prompt for count in firsts)
    completion = sum(count.completion for count in choices)
    reasoning = sum(count.reasoning for count in choices if count.has_reasoned)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": reasoning,
    }
    if report_cache:
        cached = sum(count.cached for count in firsts)
        usage["prompt_tokens_details"] = {"cached_tokens": cached, **break_of(firsts[0])}
    if reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage
