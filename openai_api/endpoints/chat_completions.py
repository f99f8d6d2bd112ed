"""`/v1/chat/completions`: continues a conversation, with the answer at once or as a stream."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from openai_api.call import Call, Reply, Streamed, Whole
from openai_api.chat_choice import spelled
from openai_api.chat_run import ChatRun, open_chat
from openai_api.chat_stream import chat_events
from openai_api.openai_context import OpenAIContext
from openai_api.request_body import read_body
from openai_api.schemas.chat import DECODER
from openai_api.schemas.common import ONLY_TIER
from openai_api.usage import usage_of
from runtime.requests.identity import created_now


async def create_chat_completion(call: Call, context: OpenAIContext) -> Reply:
    """Answer `POST /v1/chat/completions`."""
    body = await read_body(call, DECODER)
    run = await open_chat(body, context)
    head = {"id": run.id, "created": created_now(), "model": body.model or "default"}
    if body.service_tier is not None:
        head["service_tier"] = ONLY_TIER
    if body.stream:
        chunks = await run.generation.begun()
        events = chat_events(head, run.choices, chunks, body.stream_options, context)
        return Streamed(events, run.generation.close)
    return await _whole(head, run, context)


@dataclass
class _Message:
    """Builds the assistant's message from the deltas of a complete answer."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    function_call: dict[str, str] | None = None

    def add(self, delta: dict[str, Any]) -> None:
        if delta.get("reasoning_content"):
            self.reasoning.append(delta["reasoning_content"])
        if delta.get("content"):
            self.content.append(delta["content"])
        for part in delta.get("tool_calls", ()):
            if part.get("id") is not None:
                self.tool_calls.append(_copied(part))
            else:
                function = self.tool_calls[part["index"]]["function"]
                function["arguments"] += part["function"]["arguments"]
        if "function_call" in delta:
            known = self.function_call or {"name": "", "arguments": ""}
            self.function_call = {
                key: text + delta["function_call"].get(key, "") for key, text in known.items()
            }

    def body(self) -> dict[str, Any]:
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            # As in OpenAI's API, the content is null if there are only calls, else a string.
            "content": None if self._calls and not content else content,
            **spelled("".join(self.reasoning) or None),
        }
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.function_call is not None:
            message["function_call"] = self.function_call
        return message

    @property
    def _calls(self) -> bool:
        return bool(self.tool_calls) or self.function_call is not None


def _copied(call: dict[str, Any]) -> dict[str, Any]:
    # The delta is copied, because the arguments of later deltas are appended to it.
    return {key: dict(value) if isinstance(value, dict) else value for key, value in call.items()}


async def _whole(head: dict[str, Any], run: ChatRun, context: OpenAIContext) -> Whole:
    choices = run.choices
    messages = [_Message() for _ in choices]
    async with contextlib.aclosing(run.generation.chunks()) as chunks:
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
