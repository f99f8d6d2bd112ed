"""Responses in the background, read as streams: again, from any event on, by their owner."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from openai_api.responses.background_responses import BackgroundResponses
from openai_api.responses.event_log import EventLogs
from openai_api.responses.response_store import MemoryStore
from runtime.client.tenant import TENANT, acting_for
from tests.support.agents.streams import named_events
from tests.support.waiting import until_in_loop

ASKED = {"input": "Hello", "background": True, "stream": True}


@pytest.fixture
def background() -> BackgroundResponses:
    return BackgroundResponses()


@pytest.fixture
def front(make_front: Any, background: BackgroundResponses) -> Any:
    return make_front(
        responses=MemoryStore(2**20, 3600),
        background_responses=background,
        engine_options={"hold": "stay"},
    )


async def get(front: Any, response_id: str, **query: Any) -> httpx.Response:
    async with front.client() as client:
        answer: httpx.Response = await client.get(f"/v1/responses/{response_id}", params=query)
        return answer


class FullStore(MemoryStore):
    async def put(self, *_: Any) -> None:
        raise OSError("The disk is full.")


async def test_what_cannot_be_kept_is_not_made(
    make_front: Any, background: BackgroundResponses
) -> None:
    front = make_front(
        responses=FullStore(2**20, 3600),
        background_responses=background,
        engine_options={"hold": "stay"},
    )
    answer = await front.post("/v1/responses", {**ASKED, "input": "stay"})
    assert answer.status_code == 500
    (request,) = front.engine.requests
    assert front.engine.aborted == {request.request_id}


async def test_a_stream_is_read_again_from_any_event_on(front: Any) -> None:
    events = list(named_events((await front.post("/v1/responses", ASKED)).text))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["response"]["status"] for event in events[:3]] == [
        "queued",
        "queued",
        "in_progress",
    ]
    assert kinds[-1] == "response.completed"
    response_id = events[0]["response"]["id"]
    again = await get(front, response_id, stream="true")
    assert list(named_events(again.text)) == events
    rest = await get(front, response_id, stream="true", starting_after=4)
    assert list(named_events(rest.text)) == events[5:]
    nothing = await get(front, response_id, stream="true", starting_after=len(events) - 1)
    assert nothing.text == ""
    assert (await get(front, response_id)).json() == events[-1]["response"]


async def test_it_goes_on_when_its_reader_has_gone(
    front: Any, background: BackgroundResponses
) -> None:
    reader = asyncio.create_task(front.post("/v1/responses", {**ASKED, "input": "stay"}))
    await until_in_loop(lambda: len(front.engine.requests) == 1)
    response_id = front.engine.requests[0].spec.rid
    reader.cancel()
    await asyncio.wait([reader])
    assert not front.engine.aborted
    # Another one waits for what comes.
    follower = asyncio.create_task(get(front, response_id, stream="true"))
    await until_in_loop(lambda: background.running(response_id)["status"] == "in_progress")
    assert not follower.done()
    cancelled = await front.post(f"/v1/responses/{response_id}/cancel", {})
    assert cancelled.json()["status"] == "cancelled"
    *_, last = named_events((await follower).text)
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    async with front.client() as client:
        await client.delete(f"/v1/responses/{response_id}")
    assert background.logs.get(response_id) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Hello " * 500, "message"),
        (f"<think>{'Hm. ' * 500}", "reasoning"),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": "{"b" * 2000}', "function_call"),
    ],
)
async def test_what_a_cancel_cuts_is_incomplete(
    make_front: Any, background: BackgroundResponses, text: str, kind: str
) -> None:
    front = make_front(
        lambda _: text,
        responses=MemoryStore(2**20, 3600),
        background_responses=background,
        tools="hermes",
        reasoning="qwen3",
        engine_options={"step_s": 0.001},
    )
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    asked = asyncio.create_task(front.post("/v1/responses", {**ASKED, "tools": tools}))
    await until_in_loop(lambda: len(front.engine.requests) == 1)
    response_id = front.engine.requests[0].spec.rid
    await until_in_loop(lambda: background.follow(response_id, 0) is not None)
    async with contextlib.aclosing(background.follow(response_id, 0)) as events:
        async for each in events:
            if b".delta" in each:
                break
    cancelled = (await front.post(f"/v1/responses/{response_id}/cancel", {})).json()
    (item,) = cancelled["output"]
    assert (cancelled["status"], item["type"], item["status"]) == ("cancelled", kind, "incomplete")
    *_, done, last = named_events((await asked).text)
    assert (done["type"], done["item"]) == ("response.output_item.done", item)
    assert last["response"] == cancelled == (await get(front, response_id)).json()


async def test_a_failure_is_the_last_event(front: Any) -> None:
    front.engine.fail_after = 2
    *_, last = named_events((await front.post("/v1/responses", ASKED)).text)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"stream": "true"}, "not kept"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"starting_after": 3}, "needs stream"),
        ({"stream": "true", "starting_after": -1}, "starting_after must be a number"),
        ({"stream": "true", "starting_after": "9" * 30}, "starting_after must be a number"),
    ],
)
async def test_refusals(front: Any, query: dict[str, Any], words: str) -> None:
    begun = (await front.post("/v1/responses", {**ASKED, "stream": False})).json()
    refused = await get(front, begun["id"], **query)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]


async def test_nobody_else_finds_it(front: Any) -> None:
    token = TENANT.set("one")
    try:
        events = list(named_events((await front.post("/v1/responses", ASKED)).text))
    finally:
        TENANT.reset(token)
    response_id = events[0]["response"]["id"]
    for query in ({}, {"stream": "true"}):
        assert (await get(front, response_id, **query)).status_code == 404
    async with front.client() as client:
        assert (await client.delete(f"/v1/responses/{response_id}")).status_code == 404
    asked = {"input": "More", "previous_response_id": response_id}
    refused = await front.post("/v1/responses", asked)
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    token = TENANT.set("one")
    try:
        assert (await front.post("/v1/responses", asked)).status_code == 200
    finally:
        TENANT.reset(token)


async def test_the_oldest_that_are_over_make_room() -> None:
    logs = EventLogs(max_bytes=10)
    for name in ("running", "old", "new"):
        await logs.open(name).add(b"12345678")
    for name in ("old", "new"):
        log = logs.get(name)
        assert log is not None
        await log.end()
    logs.make_room()
    assert [name for name in ("running", "old", "new") if logs.get(name)] == ["running", "new"]


async def test_logs_of_a_tenant_push_out_nothing_of_others() -> None:
    logs = EventLogs(max_bytes=20)
    for name, tenant in (("first", "other"), ("old", "one"), ("new", "one")):
        with acting_for(tenant):
            log = logs.open(name)
        await log.add(b"12345678")
        await log.end()
    logs.make_room()
    assert [name for name in ("first", "old", "new") if logs.get(name)] == ["first", "new"]
