"""Requests for every API, and their merged answers without the parts that vary between runs."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {"name": "grind", "description": "Grinds grain.", "parameters": SCHEMA}
# Fields that vary between runs, or that depend on how the bytes were split into events.
_VOLATILE = frozenset(
    [
        "id",
        "item_id",
        "call_id",
        "created",
        "created_at",
        "completed_at",
        "sequence_number",
        "cached_tokens",
        "dp_rank",
        "total_retractions",
        "e2e_latency",
        "response_sent_to_client_ts",
        "total_duration",
        "load_duration",
        "prompt_eval_duration",
        "eval_duration",
        "prompt_tokens_details",
        "input_tokens_details",
        "cache_read_input_tokens",
    ]
)
_TEXTS = frozenset(
    [
        "content",
        "text",
        "delta",
        "arguments",
        "partial_json",
        "thinking",
        "reasoning_content",
        "reasoning",
    ]
)
_COLUMNS = frozenset(["content", "tokens", "token_logprobs", "top_logprobs", "text_offset"])


@dataclass(frozen=True)
class Stream:
    """One request.

    Attributes:
        path: path of the route.
        body: JSON body that is posted.
    """

    path: str
    body: dict[str, Any]


@dataclass
class Reading:
    """The answer to one request, as far as it was read.

    Attributes:
        merged: all events merged into one answer, without the parts that vary between runs.
        times: `time.monotonic()` of the beginning and of each event.
        error: why the request failed; empty if it did not.
        status: HTTP status of the response; 0 if none was received.
        is_broken: whether the connection was refused, or broke before the end of the response.
        num_samples: number of outputs that the request asks for.
        is_done: whether the response was read to its end.
    """

    merged: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    error: str = ""
    status: int = 0
    is_broken: bool = False
    num_samples: int = 1
    is_done: bool = False

    def pause_s(self, killed_at: float) -> float:
        """Return the longest time without an event after `killed_at`.

        The result is 0 unless events were read both before and after `killed_at`.
        """
        if len(self.times) < 3 or self.times[-1] < killed_at or self.times[1] > killed_at:
            return 0.0
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - max(a, killed_at) for a, b in pairs if b >= killed_at), default=0.0)


def streams(count: int, num_tokens: int, *, has_grammars: bool) -> list[Stream]:
    """Return `count` requests that use all APIs and features, some greedy and some seeded."""
    return [_stream(index, num_tokens, has_grammars=has_grammars) for index in range(count)]


def _stream(index: int, num_tokens: int, *, has_grammars: bool) -> Stream:
    text = f"{index} The miller opens the gate, and the water " + "turns the wheel " * (index % 5)
    seeded = {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0.0}
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
    sampling |= {"sampling_seed" if key == "seed" else key: each for key, each in seeded.items()}
    native = [
        {"sampling_params": sampling},
        {"sampling_params": {**sampling, "n": 2}},
        {
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        },
        {"sampling_params": {**sampling, "stop": ["ae", "zq", " th"], "min_new_tokens": 12}},
        {"sampling_params": {**sampling, "repetition_penalty": 1.1, "frequency_penalty": 0.3}},
        {"sampling_params": sampling, "stream": False},
    ]
    ends = {**sampling, "ignore_eos": False}
    constrained = [
        {"sampling_params": {**ends, "regex": "([a-f]{4} ){9}[0-9]{12}"}},
        {"sampling_params": {**ends, "json_schema": json.dumps(SCHEMA)}},
    ]
    messages = [{"role": "user", "content": text}]
    chat = {"model": "default", "messages": messages, "max_tokens": num_tokens, "stream": True}
    chats = [
        {"stream_options": {"include_usage": True}},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"stop": ["ee", "qu"]},
    ]
    schema = {"name": "miller", "schema": SCHEMA, "strict": True}
    chats_constrained: list[dict[str, Any]] = [
        {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": schema}},
    ]
    if has_grammars:
        native, chats = native + constrained, chats + chats_constrained
    common = {"model": "default", "stream": True, "temperature": 0.0}
    anthropic = {**common, "messages": messages, "max_tokens": num_tokens}
    responses = {**common, "input": text, "max_output_tokens": num_tokens, "store": False}
    ollama = {"num_predict": num_tokens, **seeded}
    kinds = [
        *(Stream("/generate", {"text": text, "stream": True, **each}) for each in native),
        *(Stream("/v1/chat/completions", {**chat, **seeded, **each}) for each in chats),
        Stream(
            "/v1/completions",
            {
                "model": "default",
                "prompt": text,
                "max_tokens": num_tokens,
                "stream": True,
                "logprobs": 2,
                **seeded,
            },
        ),
        Stream("/v1/responses", responses),
        Stream("/v1/messages", anthropic),
        Stream("/api/chat", {"model": "default", "messages": messages, "options": ollama}),
    ]
    return kinds[index % len(kinds)]


# ---- reading ----


def _merge(into: dict[str, Any], event: dict[str, Any]) -> None:
    for key, value in event.items():
        if key in _VOLATILE:
            continue
        before = into.get(key)
        if isinstance(value, dict):
            if not isinstance(before, dict):
                before = into[key] = {}
            _merge(before, value)
        elif isinstance(value, str) and key in _TEXTS:
            into[key] = (before if isinstance(before, str) else "") + value
        elif isinstance(value, list) and value and all(_is_indexed(each) for each in value):
            if not isinstance(before, dict):
                before = into[key] = {}
            for each in value:
                _merge(before.setdefault(str(each["index"]), {}), each)
        elif isinstance(value, list) and key in _COLUMNS and isinstance(before, list):
            into[key] = before + _stable(value)
        elif value is not None or key not in into:
            into[key] = _stable(value)


def _stable(value: Any) -> Any:
    """Return a value without the parts that vary between runs."""
    if isinstance(value, list):
        return [_stable(each) for each in value]
    if isinstance(value, dict):
        return {key: _stable(each) for key, each in value.items() if key not in _VOLATILE}
    return value


def _is_indexed(value: object) -> bool:
    return isinstance(value, dict) and "index" in value


def _add(reading: Reading, stream: Stream, event: dict[str, Any]) -> None:
    if event.get("error"):
        reading.error = json.dumps(event["error"])[:300]
    if event.get("type") == "ping":
        return
    if event.get("type") == "message_start":
        # The usage counts the tokens that happened to be in the first event.
        event["message"].pop("usage", None)
    name = ".".join(
        str(event[key])
        for key in ("type", "output_index", "content_index", "index")
        if key in event
    )
    slot = reading.merged.setdefault(name, {})
    if stream.path != "/generate":
        _merge(slot, event)
        return
    # Each event holds the whole answer so far.
    before, now = slot.get("text", ""), event.get("text", "")
    if not now.startswith(before):
        reading.error = reading.error or f"text taken back: {before!r} {now!r}"
    slot.clear()
    _merge(slot, event)


async def read(
    client: httpx.AsyncClient, stream: Stream, reading: Reading, slow_s: float = 0.0
) -> None:
    """Read a stream to its end into `reading`; wait `slow_s` seconds after each event."""
    reading.times.append(time.monotonic())
    try:
        async with client.stream("POST", stream.path, json=stream.body) as response:
            reading.status = response.status_code
            if response.status_code != 200:
                body = (await response.aread()).decode(errors="replace")
                reading.error = f"{stream.path}: {response.status_code} {body[:300]}"
                return
            async for line in response.aiter_lines():
                if not line:
                    continue
                reading.times.append(time.monotonic())
                if slow_s:
                    await asyncio.sleep(slow_s)
                data = line.removeprefix("data: ")
                if data.startswith("{"):
                    _add(reading, stream, json.loads(data))
                elif data.startswith("[{"):
                    for index, event in enumerate(json.loads(data)):
                        _add(reading, stream, {"index": index, **event})
    except httpx.HTTPError as error:
        reading.error = f"{stream.path}: {type(error).__name__} {error}"
        reading.is_broken = True
    reading.is_done = True


def differences(undisturbed: list[Reading], disturbed: list[Reading]) -> list[str]:
    """Return why streams of two runs differ; empty if all are equal."""
    found = []
    for index, (before, after) in enumerate(zip(undisturbed, disturbed, strict=True)):
        if difference := after.error or first_difference(before.merged, after.merged):
            found.append(f"stream {index}: {difference}")
    return found


def is_beginning(part: Any, whole: Any) -> bool:
    """Return whether the texts of a cut answer are beginnings of the whole answer's texts."""
    if not isinstance(part, dict) or not isinstance(whole, dict):
        return True
    for key, value in part.items():
        if key in _TEXTS and isinstance(value, str) and isinstance(whole.get(key, ""), str):
            if not whole.get(key, "").startswith(value):
                return False
        elif not is_beginning(value, whole.get(key)):
            return False
    return True


def first_difference(before: Any, after: Any, path: str = "") -> str:
    """Return the first place where two answers differ; empty if they are equal."""
    if before == after:
        return ""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(each for each in after if each not in before)]:
            if before.get(key) != after.get(key):
                return first_difference(before.get(key), after.get(key), f"{path}/{key}")
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            if pair[0] != pair[1]:
                return first_difference(*pair, f"{path}/{index}")
    return f"{path}: {str(before)[:300]} became {str(after)[:300]}"
