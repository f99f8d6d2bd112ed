"""Items of `/v1/responses` beside messages and functions, long conversations, pages of items."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from openai_api.responses.opaque_text import wrapped
from openai_api.responses.response_store import MemoryStore
from tests.support.agents.streams import named_events, read_responses

SHELL = '<tool_call>\n{"name": "local_shell", "arguments": {"command": ["ls", "-l"]}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEMPLATE = (
    "{{ tools or '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function }}{% endfor %}<|im_end|>\n{% endfor %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def prompt_of(front: Any, at: int = -1) -> str:
    ids = np.frombuffer(front.engine.requests[at].input_ids, dtype=np.int32)
    text: str = front.engine.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return text


async def answered(front: Any, said: Any, **fields: Any) -> dict[str, Any]:
    answer = await front.post("/v1/responses", {"input": said, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_the_clients_shell_is_called_and_answers(make_front: Any) -> None:
    front = make_front(lambda _: SHELL, template=TEMPLATE, tools="hermes")
    tools = [{"type": "local_shell"}]
    answer = await front.post("/v1/responses", {"input": "Look", "tools": tools, "stream": True})
    (call,), _ = read_responses(answer.text)
    assert (call["type"], call["status"]) == ("local_shell_call", "completed")
    assert call["action"]["command"] == ["ls", "-l"]
    for output in (
        {"type": "local_shell_call_output", "id": call["call_id"], "output": "gate.py"},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "gate.py"},
    ):
        await answered(front, [user("Look"), call, output], tools=tools)
        assert "'name': 'local_shell'" in prompt_of(front)
        assert "['ls', '-l']" in prompt_of(front)
        assert "<|im_start|>tool\ngate.py<|im_end|>" in prompt_of(front)


async def test_a_shell_call_without_a_command_is_a_function_call(make_front: Any) -> None:
    said = SHELL.replace("command", "comand")
    front = make_front(lambda _: said, template=TEMPLATE, tools="hermes")
    (item,) = (await answered(front, "Look", tools=[{"type": "local_shell"}]))["output"]
    assert item["type"] == "function_call"


async def test_tools_may_come_between_the_items(make_front: Any) -> None:
    front = make_front(lambda _: ADD, template=TEMPLATE, tools="hermes")
    add = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    more = {"type": "additional_tools", "role": "developer", "tools": [add]}
    (call,) = (await answered(front, [user("Add"), more]))["output"]
    assert (call["type"], call["name"]) == ("function_call", "add")
    assert "'name': 'add'" in prompt_of(front)


async def test_what_openais_servers_did_is_a_short_text(make_front: Any) -> None:
    front = make_front(template=TEMPLATE)
    search = {"type": "web_search_call", "status": "completed", "action": {"type": "search"}}
    await answered(front, [user("One"), search, user("Two")])
    shown = '<|im_start|>assistant\n[web_search_call {"action": {"type": "search"}}]<|im_end|>'
    assert shown in prompt_of(front)


async def test_verbosity_goes_to_the_template(make_front: Any) -> None:
    front = make_front(template="{{ verbosity }}: {{ messages[-1].content }}")
    await answered(front, "Hello", text={"verbosity": "low"})
    assert prompt_of(front) == "low: Hello"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"include": ["everything"]}, "include"),
        ({"text": {"verbosity": "some"}}, "verbosity"),
        ({"input": [{"type": "compaction", "encrypted_content": "AAAA"}]}, "cannot read it"),
        ({"input": [{"type": "compaction", "encrypted_content": "%"}]}, "cannot read it"),
        (
            {"input": [{"type": "compaction", "encrypted_content": wrapped("thought", "a")}]},
            "cannot read it",
        ),
        ({"input": [{"type": "local_shell_call", "call_id": "a", "action": {}}]}, "command"),
        ({"input": [{"type": "additional_tools", "tools": 5}]}, "input[0]"),
        ({"input": [{"type": "additional_tools", "tools": [5]}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": 5}]}, "tools[0].tools"),
    ],
)
async def test_refusals(make_front: Any, fields: dict[str, Any], words: str) -> None:
    refused = await make_front().post("/v1/responses", {"input": "a", **fields})
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]


async def test_pages_of_items(make_front: Any) -> None:
    front = make_front(responses=MemoryStore(2**20, 3600))
    said = [user(f"Line {number}") for number in range(5)]
    response_id = (await answered(front, said))["id"]

    async def page(**query: Any) -> Any:
        async with front.client() as client:
            path = f"/v1/responses/{response_id}/input_items"
            return await client.get(path, params=query)

    found: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        body = (await page(**query)).json()
        found += [item["content"][0]["text"] for item in body["data"]]
        assert (body["first_id"], body["last_id"]) == (
            body["data"][0]["id"],
            body["data"][-1]["id"],
        )
        if not body["has_more"]:
            break
        query["after"] = body["last_id"]
    assert found == [f"Line {number}" for number in (4, 3, 2, 1, 0)]
    ascending = (await page(order="asc")).json()["data"]
    assert [item["id"] for item in ascending] == [f"item_{number}" for number in range(5)]
    for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "item_9"}):
        assert (await page(**query)).status_code == 400


def long_conversation() -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "result " * 20}
    old = [item for n in range(20) for item in (user(f"Old {n} " + "x" * 200), call, output)]
    return [{"role": "developer", "content": "Stay."}, *old, user("The last.")]


async def test_the_oldest_items_make_room(make_front: Any) -> None:
    front = make_front(template=TEMPLATE)
    said = long_conversation()
    refused = await front.post("/v1/responses", {"input": said})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    answer = await answered(front, said, truncation="auto", max_output_tokens=100)
    prompt = prompt_of(front)
    assert answer["truncation"] == "auto"
    # As much as fits: one task more would not.
    assert 3000 < answer["usage"]["input_tokens"] <= 4096 - 100
    assert prompt.startswith("<|im_start|>developer\nStay.") or "system\nStay." in prompt
    assert "The last." in prompt
    assert "Old 19" in prompt
    assert "Old 0" not in prompt
    # Each result follows its call.
    assert prompt.count("im_start|>tool") == prompt.count("'name': 'add'")
    hopeless = await front.post(
        "/v1/responses", {"input": [user("x" * 5000)], "truncation": "auto"}
    )
    assert hopeless.json()["error"]["code"] == "context_length_exceeded"


async def test_a_conversation_too_long_is_told_in_the_stream(make_front: Any) -> None:
    front = make_front(template=TEMPLATE)
    answer = await front.post("/v1/responses", {"input": long_conversation(), "stream": True})
    first, last = named_events(answer.text)
    assert (first["type"], last["type"]) == ("response.created", "response.failed")
    assert last["response"]["error"]["code"] == "context_length_exceeded"


async def test_a_conversation_is_made_shorter(make_front: Any) -> None:
    front = make_front(lambda _: "They built a mill.", template=TEMPLATE)
    said = [user("Build a mill."), {"role": "assistant", "content": "Done."}, user("Thanks.")]
    shorter = (await front.post("/v1/responses/compact", {"model": "m", "input": said})).json()
    assert "Build a mill." in prompt_of(front)
    assert "Done." in prompt_of(front)
    *kept, compaction = shorter["output"]
    assert [item["content"][0]["text"] for item in kept] == ["Build a mill.", "Thanks."]
    assert compaction["type"] == "compaction"
    assert shorter["usage"]["output_tokens"] > 0
    await answered(front, [*shorter["output"], user("And now?")])
    prompt = prompt_of(front)
    assert "They built a mill." in prompt
    assert "Done." not in prompt
    assert prompt.rstrip().endswith("And now?<|im_end|>")


LONG = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}


def summariser(prompt: str) -> str:
    return "They built a mill." if "write a summary" in prompt else "So be it."


async def test_a_long_conversation_is_compacted_before_its_answer(make_front: Any) -> None:
    front = make_front(summariser, template=TEMPLATE, responses=MemoryStore(2**20, 3600))
    said = long_conversation()[:13]
    short = await answered(front, said[:3], **LONG)
    assert [item["type"] for item in short["output"]] == ["message"]
    answer = await front.post("/v1/responses", {"input": said, "stream": True, **LONG})
    events = list(named_events(answer.text))
    response = events[-1]["response"]
    compaction, message = response["output"]
    assert (compaction["type"], message["type"]) == ("compaction", "message")
    told = [event for event in events if event["type"].startswith("response.output_item")]
    assert [event["output_index"] for event in told] == [0, 0, 1, 1]
    assert told[0]["item"] == told[1]["item"] == compaction
    # What was said stays, in front of the summary; what was called is gone.
    prompt = prompt_of(front)
    assert "Old 1 " in prompt
    assert "Stay." in prompt
    assert "result" not in prompt
    assert prompt.index("Old 1 ") < prompt.index("They built a mill.")
    used = [len(request.input_ids) // 4 for request in front.engine.requests[-2:]]
    assert response["usage"]["input_tokens"] == sum(used)
    assert used[0] > 1000 > used[1]
    num_output = len("They built a mill.") + len("So be it.") + 2
    assert response["usage"]["output_tokens"] == num_output
    # The next turn goes on from there, whoever keeps the items.
    kept = {"previous_response_id": response["id"], "input": [user("And now?")], **LONG}
    stored = (await front.post("/v1/responses", kept)).json()
    assert [item["type"] for item in stored["output"]] == ["message"]
    goes_on = prompt_of(front)
    assert goes_on.startswith(prompt.removesuffix("<|im_start|>assistant\n"))
    assert goes_on.count("They built a mill.") == 1
    await answered(front, [*said, *response["output"], user("And now?")], **LONG)
    assert prompt_of(front) == goes_on


async def test_a_compaction_is_of_the_requests_own_prefixes_and_form(make_front: Any) -> None:
    """No cached prefix is shared that the request keeps apart; its tools and format are its own."""
    front = make_front(summariser, template=TEMPLATE, tools="hermes")
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    choice = {"type": "allowed_tools", "tools": [{"type": "function", "name": "add"}]}
    fields = {"cache_salt": "mine", "priority": 3, "tools": [tool], "tool_choice": choice}
    await answered(front, long_conversation()[:13], max_output_tokens=5, **LONG, **fields)
    summary, answer = front.engine.requests
    assert summary.spec.cache_namespace == answer.spec.cache_namespace != ""
    assert summary.spec.priority == answer.spec.priority == 3
    assert answer.spec.sampling.max_new_tokens == 5 < summary.spec.sampling.max_new_tokens


async def test_where_no_summary_is_written_the_answer_comes_all_the_same(make_front: Any) -> None:
    def reply(prompt: str) -> str:
        return "" if "write a summary" in prompt else "So be it."

    front = make_front(reply, template=TEMPLATE)
    answer = await answered(front, long_conversation()[:13], **LONG)
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert "result" in prompt_of(front)
    # By default two thirds of the context is long; a summary has to fit behind it, too.
    front = make_front(summariser, template=TEMPLATE)
    for length, is_long in ((2000, False), (2800, True), (3900, False)):
        said = [user("x" * length)]
        answer = await answered(front, said, context_management=[{"type": "compaction"}])
        assert (answer["output"][0]["type"] == "compaction") == is_long
    wrong = {"input": "a", "context_management": [{"type": "other"}]}
    assert (await front.post("/v1/responses", wrong)).status_code == 400


async def test_only_what_can_be_made_shorter_is(make_front: Any) -> None:
    front = make_front(lambda _: "", template=TEMPLATE, responses=MemoryStore(2**20, 3600))
    empty = await front.post("/v1/responses/compact", {"model": "m"})
    assert empty.status_code == 400
    unknown = await front.post("/v1/responses/compact", {"previous_response_id": "resp_0"})
    assert unknown.json()["error"]["code"] == "previous_response_not_found"


async def test_a_conversation_without_a_summary_comes_back_whole(make_front: Any) -> None:
    front = make_front(lambda _: "", template=TEMPLATE)
    said = [user("Build a mill."), {"role": "assistant", "content": "Done."}]
    whole = (await front.post("/v1/responses/compact", {"input": said})).json()
    assert [item["type"] for item in whole["output"]] == ["message", "message"]
    assert whole["output"][1]["content"][0]["text"] == "Done."
    assert whole["usage"]["input_tokens"] > 0


async def test_thoughts_are_the_summary_of_a_model_that_wrote_no_other(make_front: Any) -> None:
    front = make_front(lambda _: "<think>They built a", template=TEMPLATE, reasoning="qwen3")
    shorter = (await front.post("/v1/responses/compact", {"input": "Build a mill."})).json()
    assert [item["type"] for item in shorter["output"]] == ["message", "compaction"]
    await answered(front, [*shorter["output"], user("And now?")])
    assert "They built a" in prompt_of(front)
