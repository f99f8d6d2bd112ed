"""Bodies of every type that the `openai` package knows: none of them locks a conversation."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from openai.types.chat.chat_completion_message_param import ChatCompletionMessageParam
from openai.types.responses.response_input_param import ResponseInputItemParam

from tests.support.typed_bodies import examples, optional_keys

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function }}{% endfor %}<|im_end|>\n{% endfor %}"
)
HELLO = {"role": "user", "content": "Hello"}
IMAGE = "[{}: not shown, this model reads text only]"
PNG = "data:image/png;base64,iVBORw0KGgo="
# These need what this server does not keep, or ask for another route.
# An item that is not stored is not found.
REFUSED = {"ResponseCompactionItemParamParam": 400, "CompactionTrigger": 400, "ItemReference": 404}
# These change the tools or settings, or may be empty.
SETTINGS = ("AdditionalTools", "ResponseConfigurationUpdateItemParamParam")


def prompt_of(front: Any) -> str:
    ids = np.frombuffer(front.engine.requests[-1].input_ids, dtype=np.int32)
    text: str = front.engine.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return text


def bodies(expected: Any) -> list[dict[str, Any]]:
    """Examples of a type, also with null in each key that may be absent."""
    found = list(examples(expected))
    whole, least = found[:2]
    found += [{**base, key: None} for base in (whole, least) for key in optional_keys(expected)]
    for key in ("output", "content"):
        if key in whole and whole.get("role") in (None, "assistant"):
            found += [{**whole, key: value} for value in (None, [], "word")]
    return [each for at, each in enumerate(found) if each not in found[:at]]


def is_unreadable(item: dict[str, Any]) -> bool:
    """Whether a text model refuses a message: a user's image or file, or null as its content."""
    if item.get("type") not in (None, "message") or "content" not in item:
        return False
    if item["role"] in ("assistant", "tool", "function"):
        return False
    content = item["content"]
    return content is None or (
        isinstance(content, list) and any("text" not in part["type"] for part in content)
    )


@pytest.mark.parametrize("kind", get_args(ResponseInputItemParam), ids=lambda kind: kind.__name__)
async def test_items(make_front: Any, kind: Any) -> None:
    front = make_front(template=TEMPLATE)
    await front.post("/v1/responses", {"input": [HELLO, HELLO]})
    without = prompt_of(front)
    # The engine of this test compiles no grammar.
    path = "/v1/responses/input_tokens" if kind.__name__ in SETTINGS else "/v1/responses"
    for item in bodies(kind):
        answer = await front.post(path, {"input": [HELLO, item, HELLO]})
        refused = kind.__name__ in REFUSED or is_unreadable(item)
        status = REFUSED.get(kind.__name__, 400) if refused else 200
        assert answer.status_code == status, (item, answer.text)
        if kind.__name__ not in (*REFUSED, *SETTINGS, "ResponseReasoningItemParam") and not refused:
            assert prompt_of(front) != without, item


@pytest.mark.parametrize(
    "kind", get_args(ChatCompletionMessageParam), ids=lambda kind: kind.__name__
)
async def test_messages(make_front: Any, kind: Any) -> None:
    front = make_front(template=TEMPLATE)
    for message in bodies(kind):
        body = {"messages": [HELLO, message, HELLO]}
        answer = await front.post("/v1/chat/completions", body)
        expected = 400 if is_unreadable(message) else 200
        assert answer.status_code == expected, (message, answer.text)


def call(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": "call_1", "id": "x_1", "status": "completed", **fields}


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (
            call("shell_call", action={"commands": ["ls"]}),
            "assistant\n{'name': 'shell', 'arguments': {'commands': ['ls']}}",
        ),
        (
            call(
                "shell_call_output",
                output=[
                    {"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 1}}
                ],
            ),
            "tool\na\nb\n[type=exit exit_code=1]",
        ),
        (
            call("apply_patch_call", operation={"type": "delete_file", "path": "a"}),
            "assistant\n{'name': 'apply_patch', 'arguments': {'type': 'delete_file', 'path': 'a'}}",
        ),
        (call("apply_patch_call_output", output=None, status="failed"), "tool\nfailed"),
        (
            call("computer_call", actions=[{"type": "click"}]),
            "assistant\n{'name': 'computer', 'arguments': {'actions': [{'type': 'click'}]}}",
        ),
        (
            call("computer_call_output", output={"type": "computer_screenshot", "image_url": PNG}),
            f"tool\n{IMAGE.format('image')}",
        ),
        (call("program", code="1 + 1"), "{'name': 'program', 'arguments': {'code': '1 + 1'}}"),
        (call("program_output", result="2"), "tool\n2"),
        (
            call("mcp_call", server_label="s", name="find", arguments="{}", output="found"),
            'assistant\n[mcp_call {"server_label": "s", "name": "find", "arguments": "{}", '
            '"output": "found"}]',
        ),
        (
            call("code_interpreter_call", code="1", outputs=[{"type": "image", "url": PNG}]),
            '[code_interpreter_call {"code": "1", "outputs": [{"type": "image", "url": "data:..."}',
        ),
        (
            call("image_generation_call", result="QUFB"),
            f"assistant\n{IMAGE.format('image_generation_call')}",
        ),
        (
            {"type": "mcp_approval_response", "approval_request_id": "a", "approve": False},
            'user\n[mcp_approval_response {"approve": false}]',
        ),
        (
            call("function_call_output", output=[{"type": "input_image", "image_url": PNG}]),
            f"tool\n{IMAGE.format('input_image')}",
        ),
        (
            call("custom_tool_call_output", output=[{"type": "input_file", "filename": "a.pdf"}]),
            f"tool\n{IMAGE.format('input_file')}",
        ),
        ({"type": "reasoning", "id": "r", "summary": [], "content": "hm"}, "assistant\nhm"),
        ({"type": None, "role": "assistant", "content": "So"}, "assistant\nSo"),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else "",
)
async def test_what_is_shown(make_front: Any, item: dict[str, Any], shown: str) -> None:
    front = make_front(template=TEMPLATE)
    answer = await front.post("/v1/responses", {"input": [HELLO, item]})
    assert answer.status_code == 200, answer.text
    assert shown in prompt_of(front)


async def test_settings_hold_until_replaced(make_front: Any) -> None:
    front = make_front(template="{{ reasoning_effort }}|{{ messages[-1].content }}")
    changes = [{"type": "configuration_update", "reasoning": {"effort": effort}} for effort in "ab"]
    body = {"input": [HELLO, *changes, HELLO], "reasoning": {"effort": "low"}}
    await front.post("/v1/responses", body)
    assert prompt_of(front) == "b|Hello"


async def test_a_hosted_call_is_no_obstacle_to_truncation(make_front: Any) -> None:
    front = make_front(template=TEMPLATE)
    search = {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}}
    told = [{"role": "user", "content": f"{n} " + "x" * 200} for n in range(20)]
    answer = await front.post(
        "/v1/responses", {"input": [search, *told, HELLO], "truncation": "auto"}
    )
    assert answer.status_code == 200, answer.text
    assert prompt_of(front).endswith("user\nHello<|im_end|>\n")


async def test_a_tool_may_return_what_the_model_cannot_read(make_front: Any) -> None:
    front = make_front(template=TEMPLATE)
    parts = [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "file", "file": {"file_data": "QQ=="}},
    ]
    told = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [told]},
        {"role": "tool", "tool_call_id": "a", "content": parts},
    ]
    answer = await front.post("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert f"tool\nSee {IMAGE.format('image_url')} {IMAGE.format('file')}" in prompt_of(front)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [HELLO], "top_p": 0}),
        ("/v1/completions", {"prompt": "a", "top_p": 0}),
        ("/v1/responses", {"input": "a", "top_p": 0}),
        ("/v1/messages", {"messages": [HELLO], "model": "m", "max_tokens": 4, "top_p": 0}),
        ("/api/chat", {"messages": [HELLO], "model": "m", "options": {"top_p": 0}}),
    ],
)
async def test_top_p_of_zero_is_greedy(make_front: Any, path: str, body: dict[str, Any]) -> None:
    front = make_front()
    answer = await front.post(path, body)
    assert answer.status_code == 200, answer.text
    assert front.engine.requests[-1].spec.sampling.is_greedy
