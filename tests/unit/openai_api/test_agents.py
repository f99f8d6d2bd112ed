"""Sessions of coding agents, replayed: nothing refused, events complete, prompts cached.

Scheduler and prefix cache are real; the model's output is scripted.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from openai_api.chat_template import ChatTemplate
from openai_api.openai_context import OpenAIContext
from openai_api.parsers import ParserSet
from runtime.config.options import HttpArgs, ModelArgs, ServerConfig
from server.wire_routes import create_routers
from tests.support.agents.claude_code import BILLING, ClaudeCodeSession
from tests.support.agents.codex import CodexLiteSession, CodexSession
from tests.support.agents.opencode import OpenCodeSession
from tests.support.agents.session import AgentSession
from tests.support.agents.streams import read_chat, read_messages, read_responses
from tests.support.fake_engine import byte_tokenizer
from tests.support.fake_service import fake_service
from tests.support.scripted_engine import PAGE, ScriptedEngine

# Writes every thought again, those of earlier tasks too.
ALL_THOUGHTS = """{%- if tools %}{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}{{- message.content }}
{%- for call in message.tool_calls or [] %}{%- if not loop.first or message.content %}{{- '\n' }}
{%- endif %}{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}{{- '<|im_start|>assistant\n' }}"""
TOKENIZER = byte_tokenizer()
QWEN3 = Path(__file__).parents[2] / "support" / "chat_templates" / "qwen3.jinja"
TEMPLATES = {"all thoughts": lambda: ALL_THOUGHTS, "qwen3": QWEN3.read_text}
Reader = Callable[..., tuple[Any, dict[str, Any]]]
Change = Callable[[dict[str, Any]], dict[str, Any]]
AGENTS: dict[str, tuple[type[AgentSession], Reader]] = {
    "codex": (CodexSession, read_responses),
    "codex_lite": (CodexLiteSession, read_responses),
    "claude_code": (ClaudeCodeSession, read_messages),
    "opencode": (OpenCodeSession, read_chat),
}


@dataclass
class Turn:
    """A request of a session.

    Attributes:
        num_prompt: tokens of its prompt.
        num_reusable: those that stood in the same places before, in whole pages.
        num_cached: those that were taken from the cache.
        num_told: the same as the answer's usage tells it.
    """

    prompt: str
    num_prompt: int
    num_reusable: int
    num_cached: int
    num_told: int


async def replay(
    session: AgentSession,
    read: Reader,
    template: str,
    folder: Path,
    change: Change = dict,
    num_turns: int = 24,
) -> list[Turn]:
    """Have `num_turns` of a session answered; `change` gets each body before it is sent."""
    engine = ScriptedEngine(folder, session.reply)
    transport = httpx.ASGITransport(app=application(engine, template))
    seen: list[str] = []
    turns = []
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        while not session.is_over and len(turns) < num_turns:
            body = change(session.request())
            if session.is_cut:
                body[session.limit_field] = num_tokens(session.reply(""))
            answer = await client.post(session.path, json=body, headers=session.headers)
            assert answer.status_code == 200, answer.text
            answered, usage = read(answer.text, is_cut=session.is_cut)
            prompt = engine.prompts[-1]
            same = max((shared(prompt, each) for each in seen), default=0)
            reusable = num_tokens(prompt[:same]) // PAGE * PAGE
            cached = engine.num_cached[-1]
            turns.append(Turn(prompt, num_tokens(prompt), reusable, cached, _told(usage)))
            seen.append(f"{prompt}{session.reply(prompt)}<|im_end|>")
            session.take(answered)
    return turns


def application(engine: ScriptedEngine, template: str) -> FastAPI:
    http = HttpArgs(enable_cache_report=True)
    config = ServerConfig(model=ModelArgs(served_model_name="org/fake"), http=http)
    context = OpenAIContext(
        service=fake_service(engine, config=config),
        chat_template=ChatTemplate(template),
        parsers=ParserSet.choose("qwen3", "hermes", engine.tokenizer),
    )
    app = FastAPI()
    for router in create_routers(context):
        app.include_router(router)
    return app


def shared(text: str, other: str) -> int:
    """Characters that both begin with."""
    return bisect_left(range(len(text)), True, key=lambda at: not other.startswith(text[: at + 1]))


def num_tokens(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False))


def _told(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return int(details["cached_tokens"] if details else usage["cache_read_input_tokens"])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("agent", AGENTS)
async def test_a_session(agent: str, template: str, tmp_path: Path) -> None:
    kind, read = AGENTS[agent]
    turns = await replay(kind(), read, TEMPLATES[template](), tmp_path)
    assert len(turns) == 24
    assert all(turn.num_told == turn.num_cached for turn in turns)
    assert all(turn.num_cached >= 0.95 * turn.num_reusable for turn in turns[1:])
    # What the template writes again as it was is found again; else there was nothing to find.
    again = [
        turn.num_cached >= 0.95 * before.num_prompt
        for before, turn in itertools.pairwise(turns)
        if turn.prompt.startswith(before.prompt)
    ]
    assert all(again)
    assert len(again) == 23 if template == "all thoughts" else len(again) >= 18
    assert not any("billing" in turn.prompt for turn in turns)


@pytest.mark.parametrize("cut_turn", [4, 8])
@pytest.mark.parametrize("agent", AGENTS)
async def test_a_session_goes_on_behind_a_call_that_was_cut(
    agent: str, cut_turn: int, tmp_path: Path
) -> None:
    """A command in one turn, a patch in the other: the agent says what is wrong, and goes on."""
    kind, read = AGENTS[agent]
    session = kind(cut_turn)
    turns = await replay(session, read, ALL_THOUGHTS, tmp_path, num_turns=99)
    assert session.is_over
    assert len(turns) == 25
    for turn in turns[cut_turn + 1 :]:
        assert "it is cut off" in turn.prompt
    assert all(turn.num_cached >= 0.95 * turn.num_reusable for turn in turns[1:])
    # What was said before the call is found again.
    behind, before = turns[cut_turn + 1], turns[cut_turn]
    assert behind.num_cached >= 0.95 * before.num_prompt


async def test_claude_code_counts_what_it_sends(tmp_path: Path) -> None:
    session = ClaudeCodeSession()
    engine = ScriptedEngine(tmp_path, session.reply)
    transport = httpx.ASGITransport(app=application(engine, ALL_THOUGHTS))
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        for _ in range(3):
            body = session.request()
            kept = ("model", "messages", "system", "tools", "thinking")
            counted = await client.post(
                "/v1/messages/count_tokens?beta=true", json={key: body[key] for key in kept}
            )
            answer = await client.post(session.path, json=body, headers=session.headers)
            message, usage = read_messages(answer.text)
            used = usage["input_tokens"] + usage["cache_read_input_tokens"]
            assert counted.json() == {"input_tokens": used}
            session.take(message)


def _at_the_start(body: dict[str, Any], line: str) -> dict[str, Any]:
    system, *others = body["messages"]
    return {**body, "messages": [{**system, "content": f"{line}\n{system['content']}"}, *others]}


def _at_the_end(body: dict[str, Any], line: str) -> dict[str, Any]:
    return {**body, "messages": [*body["messages"], {"role": "user", "content": line}]}


@pytest.mark.parametrize(
    ("put", "least", "most"), [(_at_the_start, 0.1, 0.35), (_at_the_end, 0.85, 1.0)]
)
async def test_behind_a_line_that_changes_nothing_is_reusable(
    put: Callable[[dict[str, Any], str], dict[str, Any]], least: float, most: float, tmp_path: Path
) -> None:
    numbers = itertools.count(10_000)
    turns = await replay(
        OpenCodeSession(),
        read_chat,
        ALL_THOUGHTS,
        tmp_path,
        lambda body: put(body, f"It is {next(numbers)} o'clock."),
        num_turns=12,
    )
    share = sum(turn.num_cached for turn in turns[1:]) / sum(turn.num_prompt for turn in turns[1:])
    assert least < share < most
    assert all(turn.num_cached >= 0.95 * turn.num_reusable for turn in turns[1:])


BILLED = itertools.count(1)


def _billed(text: str) -> str:
    return f"{BILLING.format(next(BILLED))}\n\n{text}"


def _in_a_block(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "system": [{"type": "text", "text": _billed(body["system"][2]["text"])}]}


def _in_instructions(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "instructions": _billed(body["instructions"])}


def _in_a_message(body: dict[str, Any]) -> dict[str, Any]:
    alone = {"role": "system", "content": BILLING.format(next(BILLED))}
    first, *others = body["messages"]
    parts = [{"type": "text", "text": _billed(first["content"])}]
    return {**body, "messages": [alone, {**first, "content": parts}, *others]}


@pytest.mark.parametrize(
    ("agent", "change"),
    [("claude_code", _in_a_block), ("codex", _in_instructions), ("opencode", _in_a_message)],
)
async def test_a_billing_line_is_left_out_and_the_rest_stays(
    agent: str, change: Change, tmp_path: Path
) -> None:
    kind, read = AGENTS[agent]
    turns = await replay(kind(), read, ALL_THOUGHTS, tmp_path, change, num_turns=7)
    for turn in turns:
        assert "billing" not in turn.prompt
        assert "system\nYou work on a repository" in turn.prompt
    assert all(
        turn.num_cached >= 0.95 * before.num_prompt for before, turn in itertools.pairwise(turns)
    )
