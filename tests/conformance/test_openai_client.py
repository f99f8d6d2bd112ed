"""The official `openai` client against our API: every field that it reads must exist."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.grammar_backends import needs_grammars


@pytest.fixture
def client(api: Any) -> Any:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=60)


ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def test_models(client: Any, api: Any) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == [api.model]
    card = client.models.retrieve(api.model)
    assert card.owned_by == "sglang"
    assert card.object == "model"
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] > 0


def test_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody/nothing")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert caught.value.type == "invalid_request_error"


def test_chat(client: Any, api: Any) -> None:
    answer = client.chat.completions.create(
        model=api.model, messages=ASK, temperature=0, max_tokens=64
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == api.model
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    if api.echoes:
        assert choice.message.content == ASK[0]["content"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens > 0


def test_chat_stream_equals_whole_answer(client: Any, api: Any) -> None:
    asked: dict[str, Any] = {
        "model": api.model,
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 64,
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert not chunks[-2].choices[0].delta.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_without_usage(client: Any, api: Any) -> None:
    chunks = list(
        client.chat.completions.create(model=api.model, messages=ASK, stream=True, max_tokens=4)
    )
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_several_choices(client: Any, api: Any) -> None:
    answer = client.chat.completions.create(model=api.model, messages=ASK, n=3, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    chunks = list(
        client.chat.completions.create(
            model=api.model, messages=ASK, n=3, max_tokens=8, stream=True
        )
    )
    ends = [
        choice.index
        for chunk in chunks
        for choice in chunk.choices
        if choice.finish_reason is not None
    ]
    assert sorted(ends) == [0, 1, 2]
    # The ends come together, after the last of the text.
    assert all(chunk.choices[0].finish_reason for chunk in chunks[-3:])


def test_stop_and_length(client: Any, api: Any) -> None:
    answer = client.chat.completions.create(
        model=api.model, messages=ASK, temperature=0, max_completion_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    answer = client.chat.completions.create(
        model=api.model, messages=ASK, temperature=0, stop=["is"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "is" not in (answer.choices[0].message.content or "")


def test_completions(client: Any, api: Any) -> None:
    answer = client.completions.create(model=api.model, prompt="Once upon a time there was")
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16
    echoed = client.completions.create(
        model=api.model, prompt="Once", echo=True, max_tokens=2, temperature=0
    )
    assert echoed.choices[0].text.startswith("Once")


def test_completions_of_several_prompts(client: Any, api: Any) -> None:
    answer = client.completions.create(
        model=api.model, prompt=["One two", "Three four"], n=2, max_tokens=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    single = client.completions.create(model=api.model, prompt="One two", max_tokens=3)
    other = client.completions.create(model=api.model, prompt="Three four", max_tokens=3)
    assert answer.usage is not None
    assert single.usage is not None
    assert other.usage is not None
    assert answer.usage.prompt_tokens == single.usage.prompt_tokens + other.usage.prompt_tokens


def test_completion_stream(client: Any, api: Any) -> None:
    asked: dict[str, Any] = {
        "model": api.model,
        "prompt": "Once upon",
        "temperature": 0,
        "max_tokens": 8,
    }
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat_logprobs(client: Any, api: Any) -> None:
    asked = {
        "model": api.model,
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }
    choice = client.chat.completions.create(**asked).choices[0]
    entries = choice.logprobs.content
    assert entries
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text.startswith(choice.message.content)
    for entry in entries:
        assert entry.logprob <= 0
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert len(entry.top_logprobs) == 3
        values = [each.logprob for each in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for each in chunk.choices
        if each.logprobs
        for entry in each.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    values = [entry.logprob for entry in entries]
    assert [entry.logprob for entry in streamed] == pytest.approx(values, abs=1e-3)
    asked["logprobs"] = False
    del asked["top_logprobs"]
    assert client.chat.completions.create(**asked).choices[0].logprobs is None


@pytest.mark.parametrize("top", [0, 2])
def test_completion_logprobs(client: Any, api: Any, top: int) -> None:
    prompt = "Once upon"
    asked = {
        "model": api.model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": top,
        "echo": True,
    }
    answer = client.completions.create(**asked)
    (choice,) = answer.choices
    lists = choice.logprobs
    num_tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.text_offset) == num_tokens
    assert "".join(lists.tokens).startswith(choice.text)
    assert lists.token_logprobs[0] is None
    assert all(value <= 0 for value in lists.token_logprobs[1:])
    if top:
        assert lists.top_logprobs[0] is None
        assert all(len(each) <= top for each in lists.top_logprobs[1:])
        assert len(lists.top_logprobs) == num_tokens
    else:
        assert lists.top_logprobs is None
    values: list[float | None] = []
    for chunk in client.completions.create(**asked, stream=True):
        values += chunk.choices[0].logprobs.token_logprobs
    assert values[0] is None
    assert values[1:] == pytest.approx(lists.token_logprobs[1:], abs=1e-3)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 100000}, "n"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"extra_body": {"min_tokens": 9, "max_tokens": 3}}, "min_tokens"),
    ],
)
def test_bad_requests(client: Any, api: Any, change: dict[str, Any], param: str) -> None:
    asked = {"model": api.model, "messages": ASK, **change}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**asked, stream=stream)
        error = caught.value
        assert error.status_code == 400
        assert error.type == "invalid_request_error"
        assert error.param == param
        flat = error.response.json()
        assert flat["object"] == "error"
        assert flat["code"] == 400
        assert flat["message"] == flat["error"]["message"]


def test_too_long_prompt_has_openais_code(client: Any, api: Any) -> None:
    limit = client.models.retrieve(api.model).model_extra["max_model_len"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=api.model, prompt=[5] * limit)
    assert caught.value.code == "context_length_exceeded"
    assert "longer than the model's context length" in caught.value.message


def test_neutral_and_unknown_fields_pass(client: Any, api: Any) -> None:
    answer = client.chat.completions.create(
        model="whatever",
        messages=ASK,
        max_tokens=4,
        user="someone",
        logprobs=False,
        response_format={"type": "text"},
        extra_body={"regex": None, "made_up": 1, "lora_path": None, "rid": "my-own-name"},
    )
    assert answer.model == "whatever"
    assert answer.id == "my-own-name"


def test_roles_and_parts(client: Any, api: Any) -> None:
    answer = client.chat.completions.create(
        model=api.model,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]},
        ],
        max_tokens=4,
        temperature=0,
    )
    assert answer.choices[0].message.content
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="text only"):
        client.chat.completions.create(
            model=api.model,
            messages=[{"role": "user", "content": [picture]}],
        )


def test_media_type_and_broken_json(api: Any) -> None:
    url = f"{api.url}/v1/chat/completions"
    body = json.dumps({"messages": ASK})
    for headers in ({"content-type": "text/plain"}, {}):
        assert httpx.post(url, content=body, headers=headers).status_code == 400
    good = {"content-type": "application/json; charset=utf-8"}
    for broken in ("", "{", '{"messages": NaN}', "[]", '{"messages": "hi"}', "{}"):
        answer = httpx.post(url, content=broken, headers=good)
        assert answer.status_code == 400
        assert answer.json()["object"] == "error"


async def test_async_client(api: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model=api.model, messages=ASK, max_tokens=8, temperature=0
        )
        text = ""
        async for chunk in await client.chat.completions.create(
            model=api.model, messages=ASK, max_tokens=8, temperature=0, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        assert text == answer.choices[0].message.content


def test_stream_helper(client: Any, api: Any) -> None:
    with client.chat.completions.stream(
        model=api.model, messages=ASK, max_tokens=64, temperature=0
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


@needs_grammars
def test_response_format(client: Any, api: Any) -> None:
    if api.echoes:
        pytest.skip("needs a model")
    formats = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}},
    ]
    for asked in formats:
        for stream in (False, True):
            made = client.chat.completions.create(
                model=api.model,
                messages=[{"role": "user", "content": "Name a city as a JSON object."}],
                response_format=asked,
                max_tokens=200,
                temperature=0,
                stream=stream,
            )
            if stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in made)
            else:
                assert made.choices[0].finish_reason == "stop"
                text = made.choices[0].message.content
            value = json.loads(text)
            assert isinstance(value, dict)
            if asked["type"] == "json_schema":
                assert list(value) == ["city", "big"]
                assert isinstance(value["big"], bool)
    choice = client.completions.create(
        model=api.model, prompt="Yes or no?", extra_body={"regex": "(yes|no)"}
    )
    assert choice.choices[0].text in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="Only one constraint"):
        client.completions.create(
            model=api.model,
            prompt="a",
            extra_body={"regex": "a", "response_format": {"type": "json_object"}},
        )
