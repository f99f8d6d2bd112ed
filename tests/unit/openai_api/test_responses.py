"""`/v1/responses` over a fake engine: items in and out, events, storage, refusals."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from openai_api.responses.background_responses import BackgroundResponses
from openai_api.responses.response_store import (
    FileStore,
    MemoryStore,
    ResponseStore,
    StoredResponse,
)
from tests.support.waiting import until_in_loop

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
INNER = '<tool_call>\n{"name": "mcp__find", "arguments": {"q": "x"}}\n</tool_call>'
THOUGHT = "<think>\nOne and two.\n</think>\n\nThree."
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CUSTOM = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin"},
}
SPACE = {
    "type": "namespace",
    "name": "mcp",
    "description": "A server",
    "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}}],
}


@pytest.fixture
def front(make_front: Any) -> Any:
    return make_front(responses=MemoryStore(2**20, 3600), tools="hermes", reasoning="qwen3")


async def ask(front: Any, said: Any = "Hello", **fields: Any) -> httpx.Response:
    answer: httpx.Response = await front.post("/v1/responses", {"input": said, **fields})
    return answer


async def answered(front: Any, said: Any = "Hello", **fields: Any) -> dict[str, Any]:
    answer = await ask(front, said, **fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Decode a stream; each event has its name and its number."""
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as the deltas tell it; what `done` events say must be the same."""
    output: list[dict[str, Any]] = []
    text = ""
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(output)
            assert event["item"]["status"] == "in_progress"
            output.append(dict(event["item"]))
            text = ""
        elif kind.endswith(".delta"):
            assert event["item_id"] == output[-1]["id"]
            text += event["delta"]
        elif kind == "response.output_item.done":
            item, told = output[-1], event["item"]
            for key in ("arguments", "input"):
                if key in item:
                    item[key] = text
            if "content" in item:
                assert [part["text"] for part in told["content"]] == [text]
                item["content"] = told["content"]
            item["status"] = told["status"]
            if "encrypted_content" in told:
                item["encrypted_content"] = told["encrypted_content"]
            assert item == told
    return output


def prompt_of(front: Any, at: int = -1) -> str:
    ids = np.frombuffer(front.engine.requests[at].input_ids, dtype=np.int32)
    text: str = front.engine.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return text


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if "id" not in key} for item in items]


async def test_a_whole_answer(front: Any) -> None:
    response = await answered(front, model="m", metadata={"a": "b"}, instructions="Be brief.")
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"], response["model"]) == (
        "response",
        "completed",
        "m",
    )
    assert (response["metadata"], response["instructions"]) == ({"a": "b"}, "Be brief.")
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert without_ids(response["output"]) == [
        {"type": "message", "role": "assistant", "content": [part], "status": "completed"}
    ]
    usage = response["usage"]
    assert usage["input_tokens"] == len(front.engine.requests[0].input_ids) // 4
    assert usage["total_tokens"] == usage["input_tokens"] + len("Hello") + 1
    assert prompt_of(front).startswith("<|im_start|>system\nBe brief.<|im_end|>")


@pytest.mark.parametrize(
    "written",
    ["Hello", THOUGHT, f"Well.\n{CALL}\n{CALL}", f"{THOUGHT}\n{CALL}", PATCH, INNER, ""],
)
async def test_a_stream_is_the_whole_answer(make_front: Any, written: str) -> None:
    front = make_front(lambda _: written, tools="hermes", reasoning="qwen3")
    tools = [ADD, CUSTOM, SPACE, {"type": "web_search"}]
    whole = await answered(front, tools=tools)
    events = events_of(await ask(front, tools=tools, stream=True))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    streamed = events[-1]["response"]
    assert put_together(events) == streamed["output"]
    # Kept for the next turn by the client, for nothing is kept here.
    for item in (*whole["output"], *streamed["output"]):
        assert ("encrypted_content" in item) == (item["type"] == "reasoning")
    assert without_ids(streamed["output"]) == without_ids(whole["output"])
    assert streamed["usage"] == whole["usage"]


async def test_calls_have_the_form_of_their_tools(make_front: Any) -> None:
    front = make_front(lambda _: f"{CALL}{PATCH}{INNER}", tools="hermes")
    called = (await answered(front, tools=[ADD, CUSTOM, SPACE]))["output"]
    assert [item["type"] for item in called] == [
        "function_call",
        "custom_tool_call",
        "function_call",
    ]
    assert json.loads(called[0]["arguments"]) == {"a": 1, "b": 2}
    assert called[1]["input"] == "*** Begin"
    assert (called[2]["namespace"], called[2]["name"]) == ("mcp", "find")


async def test_a_conversation_goes_on_by_its_id(front: Any) -> None:
    first = await answered(front, "One", instructions="Be brief.")
    second = await answered(front, "Two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    # The instructions were those of the first turn.
    told = "<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\nOne<|im_end|>\n"
    assert prompt_of(front) == f"{told}<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"
    await answered(front, "Three", previous_response_id=second["id"])
    assert prompt_of(front).startswith(f"{told}<|im_start|>user\nTwo")
    kept = await _get(front, second["id"])
    assert kept.json() == second
    items = (await _get(front, f"{second['id']}/input_items")).json()["data"]
    assert items[0]["content"] == [{"type": "input_text", "text": "Two"}]
    assert len(items) == 3


async def test_a_client_that_keeps_everything_gets_the_same_prompt(make_front: Any) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content or '' }}|"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function }}{% endfor %}<|im_end|>\n"
        "{% endfor %}"
    )
    front = make_front(
        lambda _: f"<think>\nHm.\n</think>\n\nSo.\n{CALL}",
        template=template,
        responses=MemoryStore(2**20, 3600),
        tools="hermes",
        reasoning="qwen3",
    )
    fields: dict[str, Any] = {"tools": [ADD], "include": ["reasoning.encrypted_content"]}
    first = await answered(front, "One", **fields)
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    await answered(front, [result], previous_response_id=first["id"], **fields)
    # What agents leave of a thought.
    sent = [dict(item) for item in first["output"]]
    assert sent[0].pop("content")
    said = {"role": "user", "content": [{"type": "input_text", "text": "One"}]}
    await answered(front, [said, *sent, result], store=False, **fields)
    assert prompt_of(front, -1) == prompt_of(front, -2)
    assert "assistant\nHm.|So." in prompt_of(front)


async def test_the_end_of_a_cut_answer(front: Any) -> None:
    cut = await answered(front, "Hello there", max_output_tokens=3)
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert cut["output"][0]["status"] == "incomplete"
    events = events_of(await ask(front, "Hello there", max_output_tokens=3, stream=True))
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(put_together(events)) == without_ids(cut["output"])


async def test_a_failure_ends_a_stream_and_is_kept(front: Any) -> None:
    front.engine.fail_after = 2
    events = events_of(await ask(front, stream=True))
    failed = events[-1]["response"]
    assert (events[-1]["type"], failed["status"]) == ("response.failed", "failed")
    assert failed["error"]["code"] == "server_error"
    assert failed["error"]["message"].startswith("The worker died")
    (item,) = failed["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "He")
    assert (await _get(front, failed["id"])).json()["status"] == "failed"


@pytest.mark.parametrize(
    ("tool", "text", "kind"),
    [
        (ADD, CALL, "function_call"),
        (CUSTOM, PATCH, "custom_tool_call"),
        ({"type": "local_shell"}, CALL.replace("add", "local_shell"), "function_call"),
    ],
)
@pytest.mark.parametrize("ends", ["fails", "is cut"])
async def test_a_call_that_breaks_off_is_incomplete(
    make_front: Any, tool: dict[str, Any], text: str, kind: str, ends: str
) -> None:
    """As it stood: in the events, in the last of them, and where it is read again."""
    front = make_front(lambda _: text, responses=MemoryStore(2**20, 3600), tools="hermes")
    begun = text.partition("Begin" if kind == "custom_tool_call" else '"b"')[0]
    num_tokens = len(front.engine.tokenizer.encode(begun, add_special_tokens=False))
    limit = {} if ends == "fails" else {"max_output_tokens": num_tokens}
    if ends == "fails":
        front.engine.fail_after = num_tokens
    events = events_of(await ask(front, stream=True, tools=[tool], **limit))
    last = events[-1]["response"]
    assert last["status"] == ("failed" if ends == "fails" else "incomplete")
    (item,) = last["output"]
    assert (item["type"], item["status"]) == (kind, "incomplete")
    told = item.get("arguments", item.get("input"))
    assert told == ("*** " if kind == "custom_tool_call" else '{"a": 1, ')
    assert put_together(events) == last["output"]
    assert (await _get(front, last["id"])).json() == last


async def test_in_the_background(make_front: Any) -> None:
    background = BackgroundResponses()
    front = make_front(
        responses=MemoryStore(2**20, 3600),
        background_responses=background,
        engine_options={"hold": "stay"},
    )
    begun = await answered(front, "Hello", background=True)
    assert (begun["status"], begun["background"]) == ("queued", True)
    await until_in_loop(lambda: background.running(begun["id"]) is None)
    complete = (await _get(front, begun["id"])).json()
    assert complete["status"] == "completed"
    assert complete["output"][0]["content"][0]["text"] == "Hello"
    held = await answered(front, "stay", background=True)
    await until_in_loop(lambda: len(front.engine.requests) == 2)
    await until_in_loop(lambda: background.running(held["id"])["status"] == "in_progress")
    assert (await _get(front, held["id"])).json()["status"] == "in_progress"
    early = await ask(front, "more", previous_response_id=held["id"])
    assert "not complete" in early.json()["error"]["message"]
    cancelled = await front.post(f"/v1/responses/{held['id']}/cancel", {})
    assert cancelled.json()["status"] == "cancelled"
    await until_in_loop(lambda: len(front.engine.aborted) == 1)
    plain = await answered(front)
    refused = await front.post(f"/v1/responses/{plain['id']}/cancel", {})
    assert refused.status_code == 400
    async with front.client() as client:
        gone = await client.delete(f"/v1/responses/{held['id']}")
    assert gone.json() == {"id": held["id"], "object": "response", "deleted": True}
    assert (await _get(front, held["id"])).status_code == 404


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": []}, "input cannot be empty"),
        ({"input": [{"type": "nonsense"}]}, "input[0].type must be one of message"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role must be one of"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input[0].content[0]: this model takes text only",
        ),
        ({"input": [{"type": "item_reference", "id": 1}]}, "Expected `str`, got `int` - at `$.id`"),
        ({"input": "a", "previous_response_id": "resp_0"}, "not found"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens must be at least 1"),
        ({"input": "a", "tools": [{"type": "nonsense"}]}, "tools[0].type must be function"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0] must have a name"),
        (
            {"input": "a", "tools": [{**ADD, "parameters": {"type": 5}}]},
            "tools[0].parameters",
        ),
        ({"input": "a", "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"input": "a", "conversation": "conv_1"}, "conversation is not supported"),
        ({"input": "a", "background": True, "store": False}, "background needs store"),
    ],
)
async def test_refusals(front: Any, fields: dict[str, Any], words: str) -> None:
    refused = await front.post("/v1/responses", fields)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]
    assert not front.engine.requests


async def test_an_unknown_response_has_openais_code(front: Any) -> None:
    error = (await ask(front, "a", previous_response_id="resp_0")).json()["error"]
    assert (error["param"], error["code"]) == (
        "previous_response_id",
        "previous_response_not_found",
    )


async def test_the_regex_of_a_custom_tool(make_front: Any) -> None:
    front = make_front(lambda _: PATCH, tools="hermes")
    regex = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    asked = {"tools": [{**CUSTOM, "format": regex}], "tool_choice": "required"}
    refused = await front.post("/v1/responses", {"input": "Go", "model": "m", **asked})
    # There is no grammar back end: it is not passed over.
    assert refused.status_code == 400
    for wrong in ({"syntax": "other"}, {"definition": 5}):
        tools = [{**CUSTOM, "format": {**regex, **wrong}}]
        refused = await front.post("/v1/responses", {"input": "Go", "model": "m", "tools": tools})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tools[0].format"


async def test_only_allowed_tools_are_called(make_front: Any) -> None:
    template = "{{ tools | tojson }}{{ messages[0].content }}"
    front = make_front(lambda _: f"{CALL}{PATCH}", tools="hermes", template=template)
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "patch"}, {"type": "web_search"}],
    }
    tools = [ADD, CUSTOM, {"type": "web_search"}]
    response = await answered(front, tools=tools, tool_choice=allowed)
    kinds = [item["type"] for item in response["output"]]
    assert [kind for kind in kinds if "call" in kind] == ["custom_tool_call"]
    assert (response["tool_choice"], response["tools"]) == (allowed, tools)
    # All of them are shown.
    await answered(front, tools=tools)
    assert prompt_of(front, -1) == prompt_of(front, -2)
    counted = {"input": "Hello", "tools": tools, "tool_choice": allowed}
    assert (await front.post("/v1/responses/input_tokens", counted)).status_code == 200
    hosted = {**allowed, "tools": [{"type": "web_search"}]}
    response = await answered(front, tools=tools, tool_choice=hosted)
    assert [item["type"] for item in response["output"]] == ["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "perhaps"}, "auto or required"),
        ({"tools": "add"}, "a list of tools"),
        ({"tools": []}, "no tool that can be called"),
        ({"tools": [{"type": "web_search"}], "mode": "required"}, "no tool that can be called"),
        ({"tools": [{"type": "function", "name": "other"}]}, "tools[0] is not among"),
    ],
)
async def test_allowed_tools_that_cannot_be(front: Any, change: dict[str, Any], words: str) -> None:
    choice = {"type": "allowed_tools", "tools": [{"type": "function", "name": "add"}], **change}
    error = (await ask(front, tools=[ADD], tool_choice=choice)).json()["error"]
    assert (error["param"], words in error["message"]) == ("tool_choice", True)


async def test_nothing_is_kept_without_a_store(make_front: Any) -> None:
    front = make_front()
    response = await answered(front)
    assert response["store"] is False
    assert (await _get(front, response["id"])).status_code == 404
    stored = make_front(responses=MemoryStore(2**20, 3600))
    response = await answered(stored, store=False)
    assert (await _get(stored, response["id"])).status_code == 404
    assert (await _get(stored, "other")).status_code == 404


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def rights_in(folder: Path) -> dict[str, int]:
    return {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir()}


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_a_store_is_bounded(kind: str, tmp_path: Path) -> None:
    clock = Clock()
    store: ResponseStore
    path = tmp_path / "responses.sqlite"
    if kind == "memory":
        store = MemoryStore(1000, 10.0, clock)
    else:
        store = FileStore(path, 1000, 10.0, clock)
    stored = StoredResponse({"text": "a" * 300}, [{"role": "user"}])
    for name in "abcd":
        await store.put(name, stored)
        clock.now += 1
    # Two have room; the newest stay.
    assert [await store.get(name) for name in "abcd"] == [None, None, stored, stored]
    await store.put("large", StoredResponse({"text": "a" * 2000}, []))
    assert await store.get("large") is None
    assert await store.delete("c")
    assert not await store.delete("c")
    if kind == "file":
        # What SQLite keeps beside it is nobody else's either.
        names = ("responses.sqlite", "responses.sqlite-shm", "responses.sqlite-wal")
        assert rights_in(tmp_path) == dict.fromkeys(names, 0o600)
        again = FileStore(path, 1000, 10.0, clock)
        assert await again.get("d") == stored
    clock.now += 20
    assert await store.get("d") is None
    await store.put("e", stored)
    assert await store.get("e") == stored


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_a_tenant_pushes_out_nothing_of_others(kind: str, tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "responses.sqlite"
    store: ResponseStore
    store = MemoryStore(2000, 99.0, clock) if kind == "memory" else FileStore(path, 2000, 99, clock)
    others = StoredResponse({"text": "a" * 300}, [], "other")
    await store.put("first", others)
    for at in range(20):
        clock.now += 1
        await store.put(f"r{at}", StoredResponse({"text": "a" * 300}, [], "one"))
    assert await store.get("first") == others
    assert await store.get("r18") is not None
    assert await store.get("r0") is None


async def test_a_file_of_responses_without_owners_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    stored = StoredResponse({"text": "a" * 300}, [], "one")
    body = msgspec.json.encode(stored)
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute(
            "CREATE TABLE responses "
            "(id TEXT PRIMARY KEY, until REAL NOT NULL, size INTEGER NOT NULL, body BLOB)"
        )
        file.execute("INSERT INTO responses VALUES ('old', 1e12, ?, ?)", (len(body), body))
        file.commit()
    path.chmod(0o600)
    for _ in range(2):
        store = FileStore(path, 1000, 99.0)
        assert await store.get("old") == stored
    await store.put("other", StoredResponse({"text": "a" * 300}, [], "other"))
    await store.put("another", StoredResponse({"text": "a" * 300}, [], "other"))
    assert await store.get("old") == stored
    assert await store.get("other") is None


async def _get(front: Any, place: str) -> httpx.Response:
    async with front.client() as client:
        answer: httpx.Response = await client.get(f"/v1/responses/{place}")
    return answer
