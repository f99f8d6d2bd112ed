"""Reports of where a prompt leaves the prefix cache; they never show another tenant's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from openai_api.chat_template import ChatTemplate
from openai_api.openai_context import OpenAIContext
from runtime.config.options import HttpArgs, ServerConfig
from server.app import create_app
from tests.support.fake_engine import CHATML
from tests.support.fake_service import fake_service
from tests.support.scripted_engine import ScriptedEngine

RULES = "Be brief, and polite to the miller. "
ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


class Front:
    """A server of all wires and `/explain_cache`."""

    def __init__(self, folder: Path, *, reports: bool = True, **keys: Any) -> None:
        self.engine = ScriptedEngine(folder, lambda _: "Yes.")
        config = ServerConfig(http=HttpArgs(enable_cache_report=reports, **keys))
        service = fake_service(self.engine, config=config)
        openai = OpenAIContext(service=service, chat_template=ChatTemplate(CHATML))
        self.app = create_app(openai)

    async def post(self, path: str, body: dict[str, Any], key: str = "") -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await client.post(path, json=body, headers=headers)

    async def broken(self, route: str, system: str, **fields: Any) -> Any:
        """The break that a request's own answer tells of."""
        body = {**body_of(route, system), "return_cache_break": True, **fields}
        answer = await self.post(route, body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        return details.get("cache_break")


def body_of(route: str, system: str) -> dict[str, Any]:
    said: list[dict[str, Any]] = [{"role": "user", "content": "Is the gate open?"}]
    match route:
        case "/v1/responses":
            return {"input": said, "instructions": system, "store": False}
        case "/v1/messages":
            return {"model": "m", "max_tokens": 9, "system": system, "messages": said}
    return {"messages": [{"role": "system", "content": system}, *said]}


@pytest.fixture
async def front(tmp_path: Path) -> Front:
    return Front(tmp_path)


async def test_a_system_message_is_kept_once(front: Front) -> None:
    history = front.engine.client.history
    for minute in (1, 2):
        body = body_of("/v1/chat/completions", f"{RULES}It is 12:0{minute}. {RULES}")
        answer = await front.post("/v1/chat/completions", body)
    (trace,) = history.find(answer.json()["id"], None)
    assert trace.worker is not None
    assert trace.arrival is not None
    assert (trace.arrival.system, trace.system_text) == ("", "")
    assert history.system_of(trace) == f"{RULES}It is 12:02. {RULES}"


@pytest.mark.parametrize("route", ROUTES)
async def test_an_answer_tells_where_it_broke(front: Front, route: str) -> None:
    first = await front.broken(route, f"{RULES}It is 12:01. {RULES}")
    assert (first["index"], first["kind"], first["before"]) == (0, "new", "")
    second = await front.broken(route, f"{RULES}It is 12:02. {RULES}")
    head = f"<|im_start|>system\n{RULES}It is 12:0"
    # A token is a byte, and the mark is one of its own.
    assert second["index"] == len(head.replace("<|im_start|>", "*"))
    assert second["kind"] == "differs"
    assert head.endswith(second["before"])
    assert f"2. {RULES}".startswith(second["after"])
    # Word by word the same: all of it is there but for what fills no page.
    third = await front.broken(route, f"{RULES}It is 12:02. {RULES}")
    assert third is None or third["kind"] == "new"
    assert "cache_break" not in (await front.post(route, body_of(route, RULES))).text


@pytest.mark.parametrize("route", ROUTES)
async def test_it_can_be_asked_for_alone(front: Front, route: str) -> None:
    await front.broken(route, f"{RULES}{RULES}")
    asked = {"route": route, "body": body_of(route, f"{RULES}Be quick. {RULES}")}
    for _ in range(2):
        # Asking changes nothing.
        found = (await front.post("/explain_cache", asked)).json()
        broken = found["cache_break"]
        assert broken["before"].endswith("Be ")
        assert broken["after"].startswith("quick. ")
        assert found["cached_tokens"] == broken["index"] // 16 * 16
    assert len(front.engine.prompts) == 1


async def test_it_looks_at_its_own_name_space_alone(front: Front) -> None:
    await front.broken(ROUTES[0], RULES * 2)
    salted = await front.broken(ROUTES[0], RULES * 2, cache_salt="mine")
    assert salted["index"] == 0
    body = body_of(ROUTES[0], RULES * 2)
    found = await front.post("/explain_cache", {"body": {**body, "cache_salt": "mine"}})
    assert found.json()["cached_tokens"] > 0


async def test_tenants_see_nothing_of_each_other(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\nother\n")
    front = Front(tmp_path, api_key="k", admin_api_key="a", api_keys_file=str(keys))
    body = body_of(ROUTES[0], RULES * 2)
    assert (await front.post(ROUTES[0], body, "one")).status_code == 200
    cached = {
        key: (await front.post("/explain_cache", {"body": body}, key)).json()["cached_tokens"]
        for key in ("one", "other", "k")
    }
    assert cached.pop("one") > 0
    assert set(cached.values()) == {0}
    assert (await front.post("/explain_cache", {"body": body}, "none")).status_code == 401


async def test_the_operator_decides_whether_it_is_told(tmp_path: Path) -> None:
    front = Front(tmp_path, reports=False)
    for path, body in (
        (ROUTES[0], {**body_of(ROUTES[0], RULES), "return_cache_break": True}),
        ("/explain_cache", {"body": body_of(ROUTES[0], RULES)}),
    ):
        refused = await front.post(path, body)
        assert refused.status_code == 400
        assert "--enable-cache-report" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "body"),
        ({"body": {}, "route": "/v1/completions"}, "route"),
        ({"body": {}}, "messages"),
        ({"body": {"messages": []}}, "messages cannot be empty"),
        ({"body": {"input": []}, "route": "/v1/responses"}, "input cannot be empty"),
        ({"body": {"model": "m"}, "route": "/v1/messages"}, "messages"),
    ],
)
async def test_refusals(front: Front, asked: dict[str, Any], words: str) -> None:
    refused = await front.post("/explain_cache", asked)
    assert refused.status_code == 400
    assert words in refused.text
