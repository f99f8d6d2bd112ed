"""An aborted answer ends on every wire with an error that its clients know."""

from __future__ import annotations

import asyncio
import json
from typing import Any, get_args

import anthropic
import openai
import pytest
from openai.types.chat.chat_completion_chunk import Choice as ChatChunkChoice
from openai.types.responses import Response

from tests.support.waiting import until_in_loop
from tests.unit.ollama_api.conftest import make_front

__all__ = ["make_front"]

TURN = [{"role": "user", "content": "HOLD"}]
OPENAI = {
    "/v1/chat/completions": {"messages": TURN},
    "/v1/completions": {"prompt": "HOLD"},
}


@pytest.fixture
def front(make_front: Any) -> Any:
    return make_front(engine_options={"hold": "HOLD"})


async def aborted(front: Any, path: str, body: dict[str, Any]) -> Any:
    """What a request answers that is aborted while it runs."""
    asked = asyncio.create_task(front.post(path, body))
    await until_in_loop(lambda: len(front.engine.requests) > 0)
    front.engine.client.abort(front.engine.requests[-1].spec.rid)
    return await asked


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("n", [1, 2])
async def test_an_openai_answer_is_an_error_status(front: Any, path: str, n: int) -> None:
    body = {**OPENAI[path], "n": n}
    asked = asyncio.create_task(front.post(path, body))
    await until_in_loop(lambda: len(front.engine.requests) == n)
    front.engine.client.abort(front.engine.requests[0].spec.rid.removesuffix("_0"))
    answer = await asked
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "request_aborted"


@pytest.mark.parametrize("path", OPENAI)
async def test_an_openai_stream_ends_with_an_error_event(front: Any, path: str) -> None:
    answer = await aborted(front, path, {**OPENAI[path], "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    assert json.loads(events.pop())["error"]["code"] == "request_aborted"
    told = get_args(get_args(ChatChunkChoice.model_fields["finish_reason"].annotation)[0])
    for event in events:
        for choice in json.loads(event)["choices"]:
            assert choice["finish_reason"] in (None, *told)


@pytest.mark.parametrize("path", OPENAI)
async def test_the_official_client_raises(front: Any, path: str) -> None:
    async with front.client() as http:
        client = openai.AsyncOpenAI(
            api_key="none", base_url="http://front/v1", http_client=http, max_retries=0
        )

        async def read() -> None:
            if path.endswith("chat/completions"):
                chat = await client.chat.completions.create(model="m", messages=TURN, stream=True)
                async for _ in chat:
                    pass
            else:
                text = await client.completions.create(model="m", prompt="HOLD", stream=True)
                async for _ in text:
                    pass

        reading = asyncio.create_task(read())
        await until_in_loop(lambda: len(front.engine.requests) > 0)
        front.engine.client.abort(front.engine.requests[-1].spec.rid)
        with pytest.raises(openai.APIError) as raised:
            await reading
    assert raised.value.code == "request_aborted"


async def test_responses_say_cancelled(front: Any) -> None:
    answer = await aborted(front, "/v1/responses", {"input": "HOLD"})
    assert Response.model_validate(answer.json()).status == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_end_with_an_error(front: Any, stream: bool) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": TURN, "stream": stream}
    answer = await aborted(front, "/v1/messages", body)
    told = answer.text.rpartition("data: ")[2]
    assert anthropic.types.ErrorResponse.model_validate_json(told).error.type == (
        "invalid_request_error"
    )
    assert stream or answer.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_ollama_ends_with_an_error(front: Any, stream: bool) -> None:
    body = {"model": "m", "messages": TURN, "stream": stream}
    answer = await aborted(front, "/api/chat", body)
    assert "error" in json.loads(answer.text.strip().split("\n")[-1])
    assert stream or answer.status_code == 400
