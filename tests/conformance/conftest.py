"""The API under test: our routes over a fake engine, and the whole server with its demo model."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import uvicorn
from fastapi import FastAPI

from openai_api.chat_template import ChatTemplate
from openai_api.openai_context import OpenAIContext
from openai_api.parsers import ParserSet
from server.wire_routes import create_routers
from tests.support.fake_engine import CHATML, FakeEngine
from tests.support.fake_service import fake_service
from tests.support.server import ServerProcess
from tests.support.waiting import until


@dataclass(frozen=True)
class Api:
    """Where to send requests.

    Attributes:
        echoes: answers repeat the question, so that tests can compare texts.
    """

    url: str
    model: str
    echoes: bool


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve `app` on a free port of this machine, from a thread."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="api", daemon=True
        )
        thread.start()
        until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


@pytest.fixture(scope="session")
def fake_api() -> Iterator[Api]:
    engine = FakeEngine(step_s=0.0005)
    context = OpenAIContext(
        service=fake_service(engine),
        chat_template=ChatTemplate(CHATML),
        parsers=ParserSet.choose("qwen3", "hermes", engine.tokenizer),
    )
    app = FastAPI()
    for router in create_routers(context):
        app.include_router(router)
    with served(app) as url:
        yield Api(url, "org/fake", echoes=True)


@pytest.fixture(scope="session", params=["fake", pytest.param("server", marks=pytest.mark.slow)])
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    if request.param == "fake":
        yield request.getfixturevalue("fake_api")
        return
    with ServerProcess() as server:
        server.wait_ready()
        model = server.client.get("/v1/models").json()["data"][0]["id"]
        yield Api(server.url, model, echoes=False)
