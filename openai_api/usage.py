"""Counts the tokens of an answer, for OpenAI's `usage` with SGLang's additional keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from openai_api.parsers import ThinkingTokens
from openai_api.thought_count import ThoughtCount
from runtime.client.generation_stream import GenerationChunk
from runtime.service.cache_break import CacheBreak


@dataclass(slots=True)
class TokenCount:
    """Token counts of one choice, updated while it grows.

    Attributes:
        thinking: the tokens that mark reasoning; `None` if single tokens do not mark it.
        by_text: counts reasoning whose end is marked by text; `None` if a token marks its end, or
            if reasoning is not split off.
        images: number of placeholder tokens of the prompt's images.
        prompt, cached: number of the prompt's tokens, and of those that were cached.
        completion: number of output tokens so far.
        reasoning: number of reasoning tokens so far, including the token that ends reasoning.
        has_reasoned: whether there was any reasoning; otherwise `reasoning` is not reported.
        cache_break: where the prompt diverged from the prefix cache, if the request asks for it.
    """

    thinking: ThinkingTokens | None = None
    by_text: ThoughtCount | None = None
    images: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    has_reasoned: bool = False
    cache_break: CacheBreak | None = None
    _is_inside: bool = field(init=False)
    _last: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Begin inside reasoning, unless the output must write `reopen_ids` to begin it."""
        self._is_inside = self.thinking is None or not self.thinking.reopen_ids

    def add(self, chunk: GenerationChunk) -> None:
        """Count a chunk's tokens."""
        self.prompt, self.cached = chunk.prompt_tokens, chunk.cached_tokens
        self.completion += len(chunk.token_ids)
        if self.by_text is not None:
            self.reasoning += self.by_text.add(chunk)
        if self.thinking is not None and (self._is_inside or self.thinking.reopen_ids):
            for token_id in chunk.token_ids:
                self._follow(token_id, self.thinking)

    def _follow(self, token_id: int, thinking: ThinkingTokens) -> None:
        if self._is_inside:
            is_implied = token_id in thinking.implied_ids
            self._is_inside = token_id != thinking.close_id and not is_implied
            self.reasoning += not is_implied
        if not self._is_inside and thinking.reopen_ids:
            self._last = (*self._last, token_id)[-len(thinking.reopen_ids) :]
            if self._last == thinking.reopen_ids:
                self._is_inside = True
                self.reasoning += len(thinking.reopen_ids)


def break_of(count: TokenCount) -> dict[str, CacheBreak]:
    """Return the key `cache_break` of `usage`; an empty dict if the request did not ask for it."""
    return {} if count.cache_break is None else {"cache_break": count.cache_break}


def usage_of(
    counts: Iterable[TokenCount], *, report_cache: bool, samples_per_prompt: int = 1
) -> dict[str, Any]:
    """Return `usage`, the sum over all choices; a prompt of several choices counts once.

    Args:
        counts: the choices' counts; those of one prompt are next to each other.
        report_cache: whether to report cached prompt tokens.
        samples_per_prompt: number of choices for each prompt.
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
    details: dict[str, Any] = {}
    if report_cache:
        details["cached_tokens"] = sum(count.cached for count in firsts)
        details |= break_of(firsts[0])
    images = sum(count.images for count in firsts)
    if images:
        details["image_tokens"] = images
    usage["prompt_tokens_details"] = details or None
    if reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage
