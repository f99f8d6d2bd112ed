"""An application with the OpenAI routes over a fake engine, and a client that talks to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI

from openai_api.chat_template import ChatTemplate
from openai_api.openai_context import OpenAIContext
from openai_api.parsers import ParserSet
from server.wire_routes import create_routers
from tests.support.fake_engine import CHATML, FakeEngine, echo
from tests.support.fake_service import fake_service


@dataclass
class Front:
    """Routes, their engine, and short ways to ask."""

    engine: FakeEngine
    app: FastAPI

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, json=body)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://front")

    async def chat(self, question: str = "Hello", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": question}]
        return await self.post("/v1/chat/completions", {"messages": messages, **fields})

    async def complete(self, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})


MakeFront = Callable[..., Front]


@pytest.fixture
def make_front() -> MakeFront:
    def make(
        reply: Callable[[str], str] = echo,
        *,
        template: str | None = CHATML,
        reasoning: str | None = None,
        tools: str | None = None,
        engine_options: dict[str, Any] | None = None,
        service: dict[str, Any] | None = None,
        **openai: Any,
    ) -> Front:
        engine = FakeEngine(reply, **(engine_options or {}))
        context = OpenAIContext(
            service=fake_service(engine, **(service or {})),
            chat_template=ChatTemplate(template) if template else None,
            parsers=ParserSet.choose(reasoning, tools, engine.tokenizer),
            **openai,
        )
        app = FastAPI()
        for router in create_routers(context):
            app.include_router(router)
        return Front(engine, app)

    return make


def events_of(answer: httpx.Response) -> list[Any]:
    """Decode a stream; the end mark is checked and left out."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks[-1] == ""
    assert blocks[-2] == "data: [DONE]"
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [orjson.loads(block[6:]) for block in blocks[:-2]]


@pytest.fixture
def events() -> Callable[[httpx.Response], list[Any]]:
    return events_of
