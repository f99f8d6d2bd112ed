"""Has simulated coding agents talk to our server, whose request log is then a recording.

    python -m benchmarks.record_agents 2> LOG
    python -m benchmarks.session_trace LOG --model-path headrace/demo/model --out agents.jsonl

The agents are those of the tests (`tests/support/agents`): Claude Code, Codex, Codex with another
form of tools, and OpenCode. Each has two users, whose tasks differ, and sends 24 requests. Front,
chat template (Qwen3's), parsers, scheduler, prefix cache and request log are the product's. The
model's output is the agents' script, because the demo models cannot work on a repository. The
agents run no tools. Instead they wait before each request, for a time that is drawn from an
exponential distribution.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from openai_api.chat_template import ChatTemplate
from openai_api.openai_context import OpenAIContext
from openai_api.parsers import ParserSet
from runtime.config.options import LoggingArgs, ModelArgs, ServerConfig
from server.request_log import RequestLog
from server.wire_routes import create_routers
from tests.support.agents.claude_code import ClaudeCodeSession
from tests.support.agents.codex import CodexLiteSession, CodexSession
from tests.support.agents.opencode import OpenCodeSession
from tests.support.agents.session import AgentSession
from tests.support.agents.streams import read_chat, read_messages, read_responses
from tests.support.fake_service import fake_service
from tests.support.scripted_engine import ScriptedEngine

_TEMPLATE = Path(__file__).parents[1] / "tests" / "support" / "chat_templates" / "qwen3.jinja"
_AGENTS: list[tuple[type[AgentSession], Callable[[str], tuple[Any, Any]]]] = [
    (ClaudeCodeSession, read_messages),
    (CodexSession, read_responses),
    (CodexLiteSession, read_responses),
    (OpenCodeSession, read_chat),
]
_USERS = 2


def _ticket(number: int) -> str:
    return f"Ticket {number:03}: "


def _session_of(kind: type[AgentSession], number: int) -> AgentSession:
    class OfUser(kind):  # type: ignore[valid-type, misc]  # mypy knows no classes of arguments
        def ask(self, task: str) -> None:
            super().ask(_ticket(number) + task)

    session: AgentSession = OfUser()
    return session


def _application(engine: ScriptedEngine) -> FastAPI:
    config = ServerConfig(model=ModelArgs(served_model_name="org/scripted"))
    context = OpenAIContext(
        service=fake_service(engine, config=config),
        chat_template=ChatTemplate(_TEMPLATE.read_text()),
        parsers=ParserSet.choose("qwen3", "hermes", engine.tokenizer),
    )
    app = FastAPI()
    for router in create_routers(context):
        app.include_router(router)
    return app


async def record_agents(pause_s: float, num_turns: int) -> None:
    """Run the sessions; the server writes the lines of its request log to standard error.

    Args:
        pause_s: mean time before a request, seconds.
        num_turns: most requests of a session.
    """
    kinds = [each for each in _AGENTS for _ in range(_USERS)]
    sessions = [_session_of(kind, number) for number, (kind, _) in enumerate(kinds)]

    def reply(prompt: str) -> str:
        (asked,) = [session for number, session in enumerate(sessions) if _ticket(number) in prompt]
        return asked.reply(prompt)

    async def talk(client: httpx.AsyncClient, number: int) -> None:
        draw, session, read = random.Random(number), sessions[number], kinds[number][1]
        while not session.is_over and session.turn < num_turns:
            await asyncio.sleep(draw.expovariate(1 / pause_s))
            answer = await client.post(
                session.path, json=session.request(), headers=session.headers
            )
            answer.raise_for_status()
            session.take(read(answer.text)[0])

    with tempfile.TemporaryDirectory() as folder:
        engine = ScriptedEngine(Path(folder), reply)
        logged = LoggingArgs(log_requests=True, log_requests_level=3, log_format="json")
        RequestLog(logged, engine.client, engine.tokenizer)
        transport = httpx.ASGITransport(app=_application(engine))
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://front", timeout=600) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(len(sessions)):
                tasks.create_task(talk(client, number))


def main() -> None:
    """Run the sessions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pause", type=float, default=3.0, help="mean pause, seconds")
    parser.add_argument("--turns", type=int, default=24, help="most requests of a session")
    options = parser.parse_args()
    asyncio.run(record_agents(options.pause, options.turns))


if __name__ == "__main__":
    main()
