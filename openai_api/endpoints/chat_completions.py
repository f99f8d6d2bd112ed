"""`/v1/chat/completions`: answer a conversation, at once or as a stream."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from openai_api.call import Call, Reply, Streamed, Whole
from openai_api.chat_choice import ChatChoice
from openai_api.chat_grammar import after_reasoning, constrained
from openai_api.chat_prompt import ChatPrompt, build_chat_prompt
from openai_api.chat_stream import chat_events
from openai_api.forced_tools import forces_call
from openai_api.logprobs import chat_spec
from openai_api.openai_context import OpenAIContext
from openai_api.output_parser import OutputParser
from openai_api.request_body import read_body
from openai_api.sampling import sampling_of, wire_names
from openai_api.schemas.chat import (
    DECODER,
    ChatCompletionRequest,
    check_chat_request,
    tool_names,
)
from openai_api.schemas.common import (
    cache_namespace,
    check_rid,
    hidden_extras,
    refuse_adapter,
    session_of,
)
from openai_api.usage import TokenCount, usage_of
from runtime.client.generation_stream import GenerationInput, GenerationStream
from runtime.client.router import wanted_rank
from runtime.errors import InvalidRequest
from runtime.extras.hidden_states.answer import HiddenAnswer
from runtime.requests.request_spec import RequestSpec
from runtime.requests.sampling_params import SamplingParams, check_priority, nth_sample
from runtime.service.streams import (
    close_all,
    first_then_rest,
    merge,
    new_id,
    open_streams,
    sample_rids,
)


async def create_chat_completion(call: Call, context: OpenAIContext) -> Reply:
    """Answer `POST /v1/chat/completions`."""
    body = await read_body(call, DECODER)
    check_chat_request(body)
    check_rid(body.rid)
    refuse_adapter(body, context.service.served_model_name)
    logprobs = chat_spec(body.logprobs, body.top_logprobs)
    extras = [
        *([] if logprobs is None else [logprobs.extra()]),
        *hidden_extras(body, context.service.features.offered),
    ]
    max_tokens_name, max_tokens = _max_tokens(body)
    with wire_names(max_tokens_name, "top_logprobs"):
        sampling = await constrained(body, _sampling(body, max_tokens, context), context)
        prompt = await build_chat_prompt(body, context)
        sampling = after_reasoning(sampling, prompt, context)
        answer_id = new_id("chatcmpl", body.rid)
        inputs = [
            GenerationInput(
                prompt.input_ids,
                RequestSpec(
                    sampling=nth_sample(sampling, index),
                    rid=rid,
                    stream=bool(body.stream),
                    explicit_max_new_tokens=max_tokens is not None,
                    cache_namespace=cache_namespace(body),
                    priority=check_priority(body.priority),
                    extras=extras,
                    dp_rank=wanted_rank(body.routed_dp_rank, body.data_parallel_rank),
                ),
            )
            for index, rid in enumerate(sample_rids(answer_id, sampling.n))
        ]
        choices = [_choice(index, body, prompt, context) for index in range(sampling.n)]
        generate = context.service.generator(session_of(body))
        streams = await open_streams(generate, inputs, context.service.client.limits)
    head = {"id": answer_id, "created": int(time.time()), "model": body.model or "default"}
    if body.stream:
        chunks = await first_then_rest(merge(streams))
        events = chat_events(head, choices, chunks, body.stream_options, context)
        return Streamed(events, lambda: close_all(streams))
    return await _whole(head, choices, streams, context)


def _max_tokens(body: ChatCompletionRequest) -> tuple[str, int | None]:
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(body, name)
        if value is None:
            continue
        if value < 1:
            raise InvalidRequest(f"{name} must be at least 1, got {value}.", param=name)
        return name, value
    return "max_tokens", None


def _sampling(
    body: ChatCompletionRequest, max_tokens: int | None, context: OpenAIContext
) -> SamplingParams:
    defaults = {**context.model_defaults, **context.service.sampling_defaults}
    # Hidden special tokens would hide the markers that clients, or our parsers, look for.
    if tool_names(body) or (_separates(body) and context.parsers.hidden_markers):
        body.skip_special_tokens = False
    return sampling_of(body, max_tokens, defaults, context.service.client.limits.vocab_size)


def _separates(body: ChatCompletionRequest) -> bool:
    return body.separate_reasoning is not False


def _choice(
    index: int, body: ChatCompletionRequest, prompt: ChatPrompt, context: OpenAIContext
) -> ChatChoice:
    parser: OutputParser = context.parsers.make(
        prompt_is_open=prompt.is_open,
        separate_reasoning=_separates(body),
        stream_reasoning=body.stream_reasoning is not False,
        tool_names=tool_names(body),
        max_calls=1 if body.parallel_tool_calls is False else None,
        forces_call=forces_call(body),
    )
    close_id = context.parsers.close_id if _separates(body) else None
    pieces = context.service.token_pieces if body.logprobs else None
    hidden = None
    if body.return_hidden_states:
        hidden = HiddenAnswer(context.service.model.hidden_size, only_last=True)
    return ChatChoice(index, parser, TokenCount(close_id), pieces=pieces, hidden=hidden)


@dataclass
class _Message:
    """The assistant's message, put together from the events of a whole answer."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, delta: dict[str, Any]) -> None:
        if delta.get("reasoning_content"):
            self.reasoning.append(delta["reasoning_content"])
        if delta.get("content"):
            self.content.append(delta["content"])
        for part in delta.get("tool_calls", ()):
            if part.get("id") is not None:
                self.tool_calls.append({**part, "function": dict(part["function"])})
            else:
                function = self.tool_calls[part["index"]]["function"]
                function["arguments"] += part["function"]["arguments"]

    def body(self) -> dict[str, Any]:
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            # OpenAI answers null where there are only calls, and a string everywhere else.
            "content": None if self.tool_calls and not content else content,
            "reasoning_content": "".join(self.reasoning) or None,
        }
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


async def _whole(
    head: dict[str, Any],
    choices: list[ChatChoice],
    streams: list[GenerationStream],
    context: OpenAIContext,
) -> Whole:
    messages = [_Message() for _ in choices]
    async with contextlib.aclosing(merge(streams)) as chunks:
        async for index, chunk in chunks:
            for delta in choices[index].feed(chunk):
                messages[index].add(delta)
    body = {
        **head,
        "object": "chat.completion",
        "choices": [
            {
                "index": choice.index,
                "message": message.body(),
                "logprobs": choice.take_logprobs(),
                **choice.end(),
                **({} if choice.hidden is None else {"hidden_states": choice.hidden}),
            }
            for choice, message in zip(choices, messages, strict=True)
        ],
        "usage": usage_of(
            [choice.count for choice in choices],
            report_cache=context.service.config.http.enable_cache_report,
            samples_per_prompt=len(choices),
        ),
        "metadata": {"weight_version": context.service.weight_version},
    }
    return Whole(body)
