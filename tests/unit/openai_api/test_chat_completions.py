"""`/v1/chat/completions` over a fake engine: shapes, order, refusals, failures, disconnects."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from openai_api.schemas.chat import DECODER
from runtime.client.generation_stream import GenerationInput
from runtime.config.options import HttpArgs, ServerConfig
from runtime.errors import InvalidRequest
from runtime.ipc.messages import FinishReason
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.service.generation import generate
from tests.support.fake_engine import EOS_ID, FakeEngine
from tests.support.waiting import until_in_loop

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


async def test_whole_answer(make_front: Any) -> None:
    front = make_front()
    answer = (await front.chat("Hi")).json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer["id"])
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi", "reasoning_content": None},
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": EOS_ID,
        }
    ]
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    num_prompt = len(prompt) - len("<|im_start|>" * 2 + "<|im_end|>") + 3
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 3,
        "total_tokens": num_prompt + 3,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }
    assert answer["metadata"] == {"weight_version": "default"}
    assert answer["model"] == "default"
    # No limit means as much as fits, not a small default.
    assert front.engine.requests[0].spec.sampling.max_new_tokens == 4096 - num_prompt


async def test_stream_order(make_front: Any, events: Any) -> None:
    front = make_front()
    chunks = events(
        await front.chat("Hi", n=2, stream=True, stream_options={"include_usage": True})
    )
    deltas = [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in chunks[:-1]]
    role = {"role": "assistant", "content": "", "reasoning_content": None}
    assert deltas[:2] == [(0, role), (1, role)]
    assert deltas[-2:] == [(0, {"reasoning_content": None}), (1, {"reasoning_content": None})]
    assert all("reasoning_content" in delta for _, delta in deltas)
    ends = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert ends[:-2] == [None] * (len(ends) - 2)
    assert ends[-2:] == ["stop", "stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


async def test_continuous_usage(make_front: Any, events: Any) -> None:
    options = {"continuous_usage_stats": True}
    chunks = events(await make_front().chat("Hey", stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_cache_report(make_front: Any) -> None:
    config = ServerConfig(http=HttpArgs(enable_cache_report=True))
    answer = (await make_front(service={"config": config}).chat("Hi")).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_sampling_reaches_the_engine(make_front: Any) -> None:
    front = make_front(
        model_defaults={"temperature": 0.6, "top_k": 20},
        service={"sampling_defaults": {"top_k": 30, "top_p": 0.5}},
    )
    await front.chat(
        max_tokens=9,
        top_p=0.9,
        seed=5,
        stop=["x", "yy"],
        min_tokens=2,
        stop_token_ids=[7],
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"3": 1.5},
        min_p=0.1,
        ignore_eos=True,
        skip_special_tokens=False,
        n=2,
        priority=4,
        cache_salt="salt",
        extra_key="key",
    )
    first, second = front.engine.requests
    sampling = first.spec.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 30, 0.9)
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.seed) == (9, 2, 5)
    assert (sampling.stop, sampling.stop_token_ids) == (["x", "yy"], [7])
    assert (sampling.repetition_penalty, sampling.min_p) == (1.1, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == {3: 1.5}
    assert sampling.ignore_eos
    assert not sampling.skip_special_tokens
    assert second.spec.sampling.seed == 6
    assert first.spec.cache_namespace == "3:keysalt"
    assert first.spec.priority == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 5000}, None),
        ({"min_tokens": 9, "max_completion_tokens": 3}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"priority": 2**64}, "priority"),
        ({"temperature": "warm"}, "temperature"),
        ({"n": 10**9}, "n"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1000}, "stop_token_ids"),
        ({"logit_bias": {str(at): 1 for at in range(1000)}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 5000}]},
            "messages[0].content",
        ),
        ({"rid": ""}, "rid"),
        ({"rid": "a\nb"}, "rid"),
        ({"cache_salt": "x" * 10**6}, "cache_salt"),
        ({"model": "org/fake:adapter"}, "model"),
        ({"lora_path": "x"}, "lora_path"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"content": "no role"}]}, "messages"),
    ],
)
async def test_refusals_name_the_field(
    make_front: Any, fields: dict[str, Any], param: str | None
) -> None:
    front = make_front()
    for stream in (False, True):
        answer = await front.chat(stream=stream, **fields)
        assert answer.status_code == 400, answer.text
        body = answer.json()
        assert body["param"] == body["error"]["param"] == param
        assert "max_new_tokens" not in body["message"]
    assert front.engine.client.num_in_flight == 0


@pytest.mark.parametrize("role", ["user", "User", "system", "developer"])
async def test_a_message_that_says_nothing_is_refused(make_front: Any, role: str) -> None:
    front = make_front()
    for said in ({}, {"content": None}, {"content": []}):
        last = {"role": "user", "content": "Hi"}
        answer = await front.chat(messages=[{"role": role, **said}, last])
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content"
    assert (await front.chat(messages=[{"role": role, "content": ""}, last])).status_code == 200
    for lenient in ("assistant", "tool", "function"):
        answer = await front.chat(messages=[last, {"role": lenient}, last])
        assert answer.status_code == 200


def tool(parameters: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("choice", ["auto", "none", None])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "no such type"},
        {"type": "object", "properties": ["a"]},
        {"type": "object", "properties": {"a": "string"}},
        {"type": "object", "properties": {"a": {"type": "array", "items": 7}}},
        {"type": "object", "properties": {"a": {"anyOf": {}}}},
        {"type": "object", "required": "a"},
        {"type": "object", "properties": {"a": {"enum": "a"}}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": -1}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": 1}}},
    ],
)
async def test_parameters_that_are_no_schema_are_refused(
    make_front: Any, choice: str | None, parameters: dict[str, Any]
) -> None:
    answer = await make_front().chat(tools=[TOOLS[0], tool(parameters)], tool_choice=choice)
    assert answer.status_code == 400
    assert answer.json()["param"] == "tools[1].function.parameters"
    assert answer.json()["message"].startswith("tools[1].function.parameters at #")


async def test_schemas_that_no_grammar_follows_are_taken_where_none_is_needed(
    make_front: Any,
) -> None:
    string = {"type": "string", "maxLength": 10**9}
    odd = {
        "type": "object",
        "properties": {"a": {"not": string}, "b": {"allOf": [string, {"pattern": "("}]}},
        "required": ["elsewhere"],
        "if": {"properties": {"a": True}},
        "$ref": "http://elsewhere",
    }
    for parameters in (odd, {}, None, {"properties": {}, "x-mine": 1}):
        front = make_front()
        assert (await front.chat(tools=[tool(parameters)])).status_code == 200
    # What a walk may take is bounded over all tools together.
    many = {"type": "object", "properties": {f"p{index}": string for index in range(11_000)}}
    answer = await make_front().chat(tools=[tool(many), tool(many)])
    assert answer.status_code == 400
    assert "at most 20000 parts" in answer.json()["message"]


async def test_too_long_conversations_have_openais_code(make_front: Any) -> None:
    front = make_front()
    for question in ("x" * 5000, "x" * 10**6):
        answer = await front.chat(question)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_no_template_says_what_to_do(make_front: Any) -> None:
    answer = await make_front(template=None).chat()
    assert answer.status_code == 400
    assert "--chat-template" in answer.json()["message"]


async def test_overload_and_loading_are_503(make_front: Any) -> None:
    front = make_front()
    front.engine.refuse = FinishReason(
        "abort", message="The request queue is full.", status_code=503
    )
    for stream in (False, True):
        answer = await front.chat(stream=stream, n=2)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["message"] == "The request queue is full."
    front.engine.client.ready = False
    answer = await front.chat()
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert (await front.post("/v1/models", {})).status_code == 405
    async with front.client() as client:
        assert (await client.get("/v1/models")).status_code == 200


async def test_death_in_the_middle_of_a_stream(make_front: Any, events: Any) -> None:
    front = make_front()
    front.engine.fail_after = 2
    chunks = events(await front.chat("Hello", stream=True))
    error = chunks[-1]["error"]
    assert error["message"].startswith("The worker died")
    assert error["type"] == "server_error"
    front.engine.fail_after = 0
    assert (await front.chat("Hello")).status_code == 503


async def test_unexpected_failure_tells_nothing(make_front: Any) -> None:
    # A mistake of ours: "'int' object is not a mapping".
    answer = await make_front(model_defaults=17).chat()
    assert answer.status_code == 500
    assert "mapping" not in answer.text
    assert "id" in answer.json()["message"]


async def test_duplicate_rid(make_front: Any) -> None:
    front = make_front(engine_options={"hold": "HOLD"})
    first = asyncio.create_task(front.chat("HOLD", rid="mine"))
    await until_in_loop(lambda: front.engine.client.is_running("mine"))
    second = await front.chat("Hi", rid="mine")
    assert second.status_code == 400
    assert second.json()["param"] == "rid"
    assert front.engine.client.abort("mine") == 1
    assert (await first).json()["error"]["code"] == "request_aborted"


async def test_reasoning(make_front: Any, events: Any) -> None:
    front = make_front(lambda _: "<think>\nhm hm\n</think>\n\nYes.", reasoning="qwen3")
    answer = (await front.chat()).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm hm", "Yes.")
    assert answer["usage"]["reasoning_tokens"] == len("<\nhm hm\n>")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<\nhm hm\n>")}
    chunks = events(await front.chat(stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta["reasoning_content"] or "" for delta in deltas) == "hm hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    raw = (await front.chat(separate_reasoning=False)).json()["choices"][0]["message"]
    assert raw["content"] == "<think>\nhm hm\n</think>\n\nYes."
    held = events(await front.chat(stream=True, stream_reasoning=False))
    pieces = [chunk["choices"][0]["delta"]["reasoning_content"] for chunk in held]
    assert [piece for piece in pieces if piece] == ["hm hm"]


async def test_reasoning_opened_by_the_prompt(make_front: Any) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    front = make_front(lambda _: "so</think>No", template=template, reasoning="qwen3")
    message = (await front.chat()).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "No")


async def test_tool_calls(make_front: Any, events: Any) -> None:
    front = make_front(lambda _: f"I add.\n{CALL}\n{CALL}", tools="hermes")
    choice = (await front.chat(tools=TOOLS)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["matched_stop"] is None
    assert choice["message"]["content"] == "I add."
    calls = choice["message"]["tool_calls"]
    assert [call["index"] for call in calls] == [0, 1]
    for call in calls:
        assert re.fullmatch(r"call_[0-9a-f]{24}", call["id"])
        assert call["type"] == "function"
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    chunks = events(await front.chat(tools=TOOLS, stream=True))
    parts = [
        part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    names = [part["function"]["name"] for part in parts if "name" in part["function"]]
    assert names == ["add", "add"]
    # As OpenAI: what a later part does not say is left out, not null.
    later = [part for part in parts if "name" not in part["function"]]
    assert {tuple(sorted(part)) for part in later} == {("function", "index")}
    first = [part["function"]["arguments"] for part in later if part["index"] == 0]
    assert len(first) > 1
    assert json.loads("".join(first)) == {"a": 1, "b": 2}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    one = (await front.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1
    hidden = (await front.chat(tools=TOOLS, tool_choice="none")).json()["choices"][0]
    assert "tool_calls" not in hidden["message"]
    assert "<tool_call>" in hidden["message"]["content"]
    assert not front.engine.requests[0].spec.sampling.skip_special_tokens
    assert front.engine.requests[-1].spec.sampling.skip_special_tokens


async def test_tool_calls_without_a_parser_stay_text(make_front: Any) -> None:
    choice = (await make_front(lambda _: CALL).chat(tools=TOOLS)).json()["choices"][0]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


async def test_history_with_calls(make_front: Any) -> None:
    template = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    front = make_front(lambda prompt: prompt, template=template)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "Developer", "content": "Be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    answer = await front.post("/v1/chat/completions", {"messages": messages})
    lines = answer.json()["choices"][0]["message"]["content"].splitlines()
    shown = [json.loads(line) for line in lines]
    assert shown[0] == {"role": "system", "content": "Be kind"}
    assert shown[1]["content"] == "a b"
    assert shown[2]["content"] == ""
    assert shown[2]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    assert shown[3]["tool_call_id"] == "c1"
    call["function"]["arguments"] = "{oops"  # type: ignore[index]
    answer = await front.post("/v1/chat/completions", {"messages": messages})
    shown = json.loads(answer.json()["choices"][0]["message"]["content"].splitlines()[2])
    assert shown["tool_calls"][0]["function"]["arguments"] == "{oops"


async def test_continue_final_message(make_front: Any) -> None:
    front = make_front(lambda prompt: prompt[-9:])
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "Once upon"},
    ]
    body = {"messages": messages, "continue_final_message": True}
    answer = (await front.post("/v1/chat/completions", body)).json()
    assert answer["choices"][0]["message"]["content"] == "Once upon"


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts(make_front: Any, stream: bool) -> None:
    front = make_front(lambda _: "x" * 3000, engine_options={"step_s": 0.01, "hold": "HOLD"})
    engine: FakeEngine = front.engine

    async def in_flight(count: int) -> None:
        await until_in_loop(lambda: engine.client.num_in_flight == count)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(front.app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve([listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
        question = "Hi" if stream else "HOLD"
        body = {
            "messages": [{"role": "user", "content": question}],
            "stream": stream,
            "n": 2,
            "max_tokens": 500,
        }
        async with httpx.AsyncClient(timeout=60) as client:
            if stream:
                async with client.stream("POST", url, json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        break
            else:
                call = asyncio.create_task(client.post(url, json=body))
                await in_flight(2)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
        await in_flight(0)
        assert len(engine.aborted) == 2
        server.should_exit = True
        await serving


async def test_one_refused_sample_takes_the_others_back() -> None:
    engine = FakeEngine()
    client = engine.client
    context: Any = SimpleNamespace(client=client, generator=lambda _: client.generate)
    inputs = [
        GenerationInput([1], RequestSpec(row=RowSpec(sampling=SamplingParams()), rid="same"))
        for _ in range(2)
    ]
    with pytest.raises(InvalidRequest):
        await generate(context, inputs)
    assert engine.client.num_in_flight == 0
    assert engine.aborted == {1}


def test_decoder_is_strict_and_knows_no_extra_fields() -> None:
    body = DECODER.decode(b'{"messages": [{"role": "user", "made_up": 1}], "other": [1]}')
    assert body.messages[0].content is None
