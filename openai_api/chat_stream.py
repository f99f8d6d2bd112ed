"""Makes the events of a streamed chat answer, in the order that clients rely on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any

from openai_api.chat_choice import ChatChoice
from openai_api.obfuscation import obfuscation_of
from openai_api.openai_context import OpenAIContext
from openai_api.schemas.common import StreamOptions
from openai_api.usage import usage_of
from runtime.service.generation import Chunk, Indexed, event, joined

_OPEN = {"finish_reason": None, "matched_stop": None}


async def chat_events(
    head: dict[str, Any],
    choices: list[ChatChoice],
    chunks: AsyncGenerator[Indexed, None],
    options: StreamOptions | None,
    context: OpenAIContext,
) -> AsyncGenerator[Chunk, None]:
    """Yield events: each choice's role, its deltas, its end, and at last the usage if requested.

    Args:
        head: id, creation time and model, which every event repeats.
        choices: one per sample, still empty.
        chunks: the engine's chunks, each with its choice's index.
        options: what else to report.
        context: the server's context.
    """
    options = options or StreamOptions()
    head = {"id": head["id"], "object": "chat.completion.chunk", **head}

    def usage() -> dict[str, Any]:
        return usage_of(
            [choice.count for choice in choices],
            report_cache=context.service.config.http.enable_cache_report,
            samples_per_prompt=len(choices),
        )

    def chunk_event(
        index: int,
        delta: dict[str, Any],
        end: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
    ) -> Chunk:
        content = {
            **head,
            "choices": [{"index": index, "delta": delta, "logprobs": logprobs, **end}],
        }
        if options.continuous_usage_stats:
            content["usage"] = usage()
        elif options.include_usage:
            content["usage"] = None
        if options.include_obfuscation:
            content["obfuscation"] = obfuscation_of(delta)
        return event(content)

    async with contextlib.aclosing(chunks):
        is_first = True
        async for index, chunk in chunks:
            choice = choices[index]
            deltas = choice.feed(chunk)
            sent = []
            if is_first:
                is_first = False
                role = {"role": "assistant", "content": "", "reasoning_content": None}
                sent = [chunk_event(choice.index, role, _OPEN) for choice in choices]
            for delta, logprobs in zip(deltas, _logprobs(choice, deltas), strict=True):
                sent.append(chunk_event(index, delta, _OPEN, logprobs))
            for ready in joined(sent):
                yield ready
    empty = {"reasoning_content": None}
    ends = [
        chunk_event(choice.index, empty, choice.end(), choice.take_logprobs()) for choice in choices
    ]
    ends += [
        chunk_event(choice.index, {**empty, "hidden_states": choice.hidden}, _OPEN)
        for choice in choices
        if choice.hidden is not None
    ]
    for ready in joined(ends):
        yield ready
    if options.include_usage:
        yield event({**head, "choices": [], "usage": usage()})


def _logprobs(
    choice: ChatChoice, deltas: Sequence[dict[str, Any]]
) -> Iterable[dict[str, Any] | None]:
    """Return each delta's logprobs: all known ones for the first delta with text, else None."""
    if choice.logprobs is None:
        return (None,) * len(deltas)
    return _placed(choice, deltas)


def _placed(
    choice: ChatChoice, deltas: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any] | None]:
    is_told = False
    for delta in deltas:
        is_first = bool(delta.get("content")) and not is_told
        is_told = is_told or is_first
        yield choice.take_logprobs() if is_first else None
