"""Blocks of newer clients: their text is shown, and none makes a conversation fail."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from anthropic.types import ContentBlockParam, tool_result_block_param
from anthropic.types.beta import BetaContentBlockParam, beta_tool_result_block_param
from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

from tests.unit.anthropic_api.test_messages import HELLO, ask, prompt_of

# What newer clients send, and what the model reads of it.
BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "cited": ({"type": "text", "text": "So it is.", "citations": []}, "So it is."),
    "text document": (
        {
            "type": "document",
            "title": "Notes",
            "context": "of May",
            "source": {"type": "text", "media_type": "text/plain", "data": "Rain."},
            "citations": {"enabled": True},
        },
        "Notes\nof May\nRain.",
    ),
    "document of blocks": (
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": "One"}]},
        },
        "One",
    ),
    "document of one text": (
        {"type": "document", "source": {"type": "content", "content": "One"}},
        "One",
    ),
    "pdf": (
        {
            "type": "document",
            "title": "Bill",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
        },
        "Bill\n[document: not shown, this model reads text only]",
    ),
    "linked": (
        {"type": "document", "source": {"type": "url", "url": "https://a.example/b.pdf"}},
        "https://a.example/b.pdf\n[document: not shown, this model reads text only]",
    ),
    "search result": (
        {
            "type": "search_result",
            "source": "https://a.example",
            "title": "Rain",
            "content": [{"type": "text", "text": "It rains."}, {"type": "text", "text": "Much."}],
            "citations": {"enabled": True},
        },
        "Rain\nhttps://a.example\nIt rains.\nMuch.",
    ),
    "unknown": (
        {"type": "hologram", "text": "AbCd", "source": {"data": "AbCd"}},
        "[hologram: not shown, this model reads text only]",
    ),
    "tool reference": ({"type": "tool_reference", "tool_name": "get_rain"}, "get_rain"),
    "servers' tool": (
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"q": "é"}},
        '[web_search {"q": "é"}]',
    ),
    "searched": (
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [
                {
                    "type": "web_search_result",
                    "title": "Rain",
                    "url": "https://a.example",
                    "encrypted_content": "AbCd",
                }
            ],
        },
        "Rain\nhttps://a.example",
    ),
    "search failed": (
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
        },
        "unavailable",
    ),
    "fetched": (
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "srvtoolu_2",
            "content": {
                "type": "web_fetch_result",
                "url": "https://a.example",
                "content": {
                    "type": "document",
                    "title": "Page",
                    "source": {"type": "text", "media_type": "text/plain", "data": "Words"},
                },
            },
        },
        "https://a.example\nPage\nWords",
    ),
    "executed": (
        {
            "type": "bash_code_execution_tool_result",
            "tool_use_id": "srvtoolu_3",
            "content": {
                "type": "bash_code_execution_result",
                "stdout": "out",
                "stderr": "err",
                "return_code": 1,
                "content": [],
            },
        },
        "out\nerr",
    ),
    "found tools": (
        {
            "type": "tool_search_tool_result",
            "tool_use_id": "srvtoolu_4",
            "content": {
                "type": "tool_search_tool_search_result",
                "tool_references": [{"type": "tool_reference", "tool_name": "get_rain"}],
            },
        },
        "get_rain",
    ),
    "file": (
        {"type": "container_upload", "file_id": "file_1"},
        "[container_upload: not shown, this model reads text only]",
    ),
    "of a later client": (
        {"type": "moon_phase_tool_result", "tool_use_id": "srvtoolu_5", "content": 5},
        "[moon_phase_tool_result: not shown, this model reads text only]",
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
async def test_blocks_of_newer_clients(make_front: Any, name: str, role: str) -> None:
    block, shown = BLOCKS[name]
    front = make_front()
    if role == "tool":
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block]}
        turns: list[dict[str, Any]] = [{"role": "user", "content": [result]}]
    else:
        turns = [{"role": role, "content": [block]}, *([] if role == "user" else HELLO)]
    answer = await ask(front, turns)
    assert answer.status_code == 200, answer.text
    assert f"<|im_start|>{role}\n{shown}<|im_end|>" in prompt_of(front)
    counted = await front.post("/v1/messages/count_tokens", {"model": "m", "messages": turns})
    assert counted.json() == {"input_tokens": answer.json()["usage"]["input_tokens"]}


async def test_a_call_inside_a_result_is_a_note(make_front: Any) -> None:
    call = {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [call]}
    front = make_front()
    answer = await ask(front, [{"role": "user", "content": [result]}])
    assert answer.status_code == 200, answer.text
    shown = "[tool_use: not shown, this model reads text only]"
    assert f"<|im_start|>tool\n{shown}<|im_end|>" in prompt_of(front)


def _types(hint: Any, found: set[str]) -> None:
    """The values of `type` of all the package's blocks in a union."""
    if is_typeddict(hint):
        found.update(get_args(get_type_hints(hint)["type"]))
    elif isinstance(hint, type) and issubclass(hint, BaseModel):
        found.update(get_args(hint.model_fields["type"].annotation))
    else:
        for each in get_args(hint):
            _types(each, found)


async def test_every_type_of_the_official_package_is_taken(make_front: Any) -> None:
    in_messages: set[str] = set()
    _types(ContentBlockParam, in_messages)
    _types(BetaContentBlockParam, in_messages)
    in_results: set[str] = set()
    _types(tool_result_block_param.Content, in_results)
    _types(beta_tool_result_block_param.Content, in_results)
    assert {"server_tool_use", "search_result", "tool_result"} <= in_messages
    assert "tool_reference" in in_results
    # The chat's own have fields of their own, and are tested above.
    own = {"text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": kind}]} for kind in in_messages - own
    ]
    parts = [{"type": kind} for kind in in_results - own] + [{"type": "image", "source": {}}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": parts}
    answer = await ask(make_front(), [*messages, {"role": "user", "content": [result]}])
    assert answer.status_code == 200, answer.text
