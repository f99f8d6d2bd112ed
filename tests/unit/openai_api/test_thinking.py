"""Thoughts: budgets, grammars that begin after them, and counts of their tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from runtime.requests.sampling_params import ThinkingSpec
from runtime.text.tokenizer import Tokenizer
from tests.support.fake_engine import EOS_ID, byte_tokenizer
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.grammar_walk import InProcessCompiler

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
MARKS = (*HARMONY, "◁think▷", "◁/think▷", "<|tool_calls_section_begin|>", "<tool_call>")
JSON = {"type": "json_object"}
# The prompt ends inside thoughts, or has turned them off.
OPEN = "{{ messages[0].content }}<think>\n"
CLOSED = "{{ messages[0].content }}<think>\n\n</think>\n\n"
PLAIN = "{{ messages[0].content }}"


def tokenizer() -> Tokenizer:
    """The fake engine's, with the marks of other families as special tokens."""
    return byte_tokenizer(more_special=MARKS)


TOKENS = tokenizer()


def ids(text: str) -> list[int]:
    return TOKENS.encode(text, add_special_tokens=False)


@pytest.fixture
def ask(make_front: Any, tmp_path: Any) -> Any:
    """The `thinking` of a request that came to the scheduler, and the answer."""

    async def ask(
        reasoning: str | None,
        template: str = PLAIN,
        reply: str = "{}",
        tool_parser: str = "hermes",
        **fields: Any,
    ) -> tuple[ThinkingSpec | None, dict[str, Any]]:
        front = make_front(
            lambda _: reply,
            reasoning=reasoning,
            template=template,
            tools=tool_parser,
            engine_options={"tokenizer": TOKENS},
        )
        front.engine.client.grammars = InProcessCompiler(BACKENDS[0], tmp_path, TOKENS, [EOS_ID])
        answer = await front.chat(**fields)
        assert answer.status_code == 200, answer.text
        return front.engine.requests[-1].spec.sampling.thinking, answer.json()

    return ask


@needs_grammars
@pytest.mark.parametrize("name", list(REASONING_PARSERS))
async def test_a_grammar_waits_for_thoughts(ask: Any, name: str) -> None:
    """With each parser, for each way in which a prompt may end."""
    kind = REASONING_PARSERS.load(name)
    always = kind(prompt_is_open=False).is_reasoning
    end, bridge = ids(kind.close_tag), ids(kind.bridge)
    assert len(end) == 1
    inside = ThinkingSpec(end_ids=end, bridge_ids=bridge)
    may_begin = ThinkingSpec(open_ids=ids(kind.open_tag), end_ids=end)
    assert len(may_begin.open_ids) == 1 or kind.lead
    template = f"{PLAIN}{kind.open_tag}\n"
    off = f"{PLAIN}{kind.open_tag}{kind.close_tag}\n"
    turned_off = {"response_format": JSON, "chat_template_kwargs": {"enable_thinking": False}}
    # Where an answer begins with a header, the model chooses whatever the prompt says.
    if kind.lead:
        begun = {"lead_ids": ids(kind.lead), "bridge_ids": bridge}
        implied = [token_id for text in kind.ends_before for token_id in ids(text)]
        inside = may_begin = msgspec.structs.replace(may_begin, **begun, implied_ids=implied)
    certain = inside if always or kind.lead else None
    assert (await ask(name, template, response_format=JSON))[0] == inside
    assert (await ask(name, PLAIN, response_format=JSON))[0] == (inside if always else may_begin)
    assert (await ask(name, off, response_format=JSON))[0] == certain
    assert (await ask(name, PLAIN, **turned_off))[0] == certain
    # Nothing to wait for.
    assert (await ask(name, template))[0] is None


@needs_grammars
async def test_budgets(ask: Any) -> None:
    close, forced = ids("</think>"), ids("\n</think>\n\n")
    budget = {"max_thinking_tokens": 7}
    spec = ThinkingSpec(end_ids=close, budget=7, forced_ids=forced)
    assert (await ask("qwen3", OPEN, **budget))[0] == spec
    spec = msgspec.structs.replace(spec, open_ids=ids("<think>"))
    assert (await ask("qwen3", PLAIN, **budget, response_format=JSON))[0] == spec
    assert (await ask("qwen3", CLOSED, **budget))[0] is None
    # gpt-oss goes on to its answer, unless it might call a tool instead.
    tools = [{"type": "function", "function": {"name": "now"}}]
    end, bridge = ids("<|end|>"), ids("<|start|>assistant<|channel|>final<|message|>")
    harmony = ThinkingSpec(
        open_ids=ids("<|channel|>analysis<|message|>"),
        lead_ids=ids("<|channel|>final<|message|>"),
        end_ids=end,
        implied_ids=[*ids("<|start|>"), *ids("<|channel|>")],
    )
    spec = msgspec.structs.replace(harmony, bridge_ids=bridge, budget=0, forced_ids=[*end, *bridge])
    assert (await ask("gpt-oss", PLAIN, max_thinking_tokens=0))[0] == spec
    spec = msgspec.structs.replace(harmony, budget=7, forced_ids=end)
    assert (await ask("gpt-oss", PLAIN, tools=tools, **budget))[0] == spec
    must_call, _ = await ask("gpt-oss", PLAIN, tools=tools, tool_choice="required")
    assert must_call == msgspec.structs.replace(harmony, bridge_ids=bridge)


@needs_grammars
@pytest.mark.parametrize("name", ["kimi_k2", "glm45"])
async def test_a_call_ends_thoughts_where_one_may_come(ask: Any, name: str) -> None:
    """For text, tokens and their count alike; where none may come, its mark is a thought."""
    (mark,) = REASONING_PARSERS.load(name).call_opens
    tools = [{"type": "function", "function": {"name": "now"}}]
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}}
    strict = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    text, budget = f"<think>ab{mark}cd", {"max_thinking_tokens": 7}
    for fields, may_call in (
        ({"tools": tools, **budget}, True),
        ({"tools": tools, "response_format": JSON, **budget}, True),
        ({"tools": strict, **budget}, True),
        ({"tools": tools, "tool_choice": "none", **budget}, False),
        ({"tools": tools, "tool_choice": "required", **budget}, False),
        ({"response_format": JSON, **budget}, False),
        (budget, False),
    ):
        spec, answer = await ask(name, PLAIN, text, **fields)
        assert spec is not None
        assert spec.implied_ids == (ids(mark) if may_call else [])
        message = answer["choices"][0]["message"]
        said = ("ab", f"{mark}cd") if may_call else (f"ab{mark}cd", "")
        assert (message["reasoning_content"], message["content"]) == said
        # All of them, the end of the text too, where nothing ends them.
        assert answer["usage"]["reasoning_tokens"] == (3 if may_call else 7)


@needs_grammars
async def test_strict_beside_thoughts(ask: Any) -> None:
    """Where calls are messages like thoughts one may come first: its grammar holds from there."""
    strict = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    function = {"name": "now", "parameters": strict, "strict": True}
    tools = [{"type": "function", "function": function}]
    assert (await ask("gpt-oss", PLAIN, tools=tools, tool_parser="gpt-oss"))[0] is None
    inside = ThinkingSpec(end_ids=ids("</think>"))
    assert (await ask("deepseek-r1", OPEN, tools=tools, tool_parser="gpt-oss"))[0] == inside
    # A section of calls ends thoughts, too.
    spec, _ = await ask("kimi_k2", OPEN, tools=tools, tool_parser="kimi_k2")
    assert spec is not None
    assert spec.implied_ids == ids("<|tool_calls_section_begin|>")


@needs_grammars
async def test_a_budget_beside_a_call_that_may_come_first(make_front: Any, tmp_path: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    front = make_front(
        reasoning="gpt-oss", tools="gpt-oss", engine_options={"tokenizer": TOKENS}, template=PLAIN
    )
    front.engine.client.grammars = InProcessCompiler(BACKENDS[0], tmp_path, TOKENS, [EOS_ID])
    function = {"name": "now", "parameters": schema, "strict": True}
    tools = [{"type": "function", "function": function}]
    answer = await front.chat(tools=tools, max_thinking_tokens=5)
    assert answer.status_code == 400
    assert "excludes strict" in answer.json()["error"]["message"]
    # Agents name a budget to every model.
    body = {
        "model": "m",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "Go"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "now", "input_schema": schema, "strict": True}],
    }
    assert (await front.post("/v1/messages", body)).status_code == 200
    assert front.engine.requests[-1].grammar_key
    assert front.engine.requests[-1].spec.sampling.thinking is None


async def test_a_budget_that_cannot_be_kept_is_refused(make_front: Any) -> None:
    for reasoning, words in ((None, "--reasoning-parser"), ("kimi", "not one token")):
        answer = await make_front(reasoning=reasoning).chat(max_thinking_tokens=5)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_thinking_tokens"
        assert words in answer.json()["error"]["message"]
    answer = await make_front(reasoning="qwen3").chat(max_thinking_tokens=-1)
    assert answer.status_code == 400


async def test_messages_keep_the_budget_where_they_can(make_front: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    messages = [{"role": "user", "content": "Go"}]
    body = {"model": "m", "max_tokens": 50, "messages": messages, "thinking": thinking}
    kept = ThinkingSpec(end_ids=ids("</think>"), budget=1024, forced_ids=ids("\n</think>\n\n"))
    for reasoning, template, expected in (
        ("qwen3", OPEN, kept),
        ("kimi", OPEN, None),
        (None, OPEN, None),
    ):
        front = make_front(reasoning=reasoning, template=template)
        assert (await front.post("/v1/messages", body)).status_code == 200
        assert front.engine.requests[-1].spec.sampling.thinking == expected


@needs_grammars
async def test_tokens_of_thoughts_are_counted(ask: Any) -> None:
    text = "<think>\nab\n</think>\n\n{}"
    _, answer = await ask("qwen3", PLAIN, text)
    # Both tags, two letters, two line breaks.
    assert answer["usage"]["reasoning_tokens"] == 6
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    first = "<|channel|>analysis<|message|>ab<|end|>"
    text = f"{first}<|start|>assistant{first}<|start|>assistant<|channel|>final<|message|>ok"
    _, answer = await ask("gpt-oss", PLAIN, text)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("abab", "ok")
    assert answer["usage"]["reasoning_tokens"] == 2 * len(ids(first))
    # What is said before, or without the mark of an end, is told apart as well.
    said = "<|channel|>commentary<|message|>so<|end|><|start|>assistant"
    text = f"{said}{first.removesuffix('<|end|>')}<|channel|>final<|message|>ok"
    _, answer = await ask("gpt-oss", PLAIN, text)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("ab", "sook")
    assert answer["usage"]["reasoning_tokens"] == len(ids(first)) - 1
    _, answer = await ask("gpt-oss", PLAIN, "<|channel|>final<|message|>ok")
    assert answer["usage"]["reasoning_tokens"] == 0


@needs_grammars
@pytest.mark.parametrize("separates", [True, False])
async def test_a_forced_call_behind_thoughts(ask: Any, separates: bool) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    text = '<think>hm</think>[{"name": "now", "parameters": {}}]'
    fields = {"tools": tools, "tool_choice": "required", "separate_reasoning": separates}
    _, answer = await ask("qwen3", PLAIN, text, **fields)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "hm"


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
async def test_thoughts_come_back_under_either_name(make_front: Any, key: str) -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    front = make_front(lambda prompt: prompt, template=template)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", key: "because"},
        {"role": "user", "content": "c"},
    ]
    answer = (await front.post("/v1/chat/completions", {"messages": messages})).json()
    assert answer["choices"][0]["message"]["content"] == "[|a][because|b][|c]"
