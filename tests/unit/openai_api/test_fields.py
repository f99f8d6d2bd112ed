"""Each field of OpenAI's routes does what its page says, alone and combined with others."""

from __future__ import annotations

import asyncio
import json
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as TextParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from docs.openai_fields import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, ROUTES, Route
from openai_api.responses.response_store import MemoryStore
from runtime.client.adapter_record import Adapter
from tests.support.fake_engine import CHATML, EOS_ID, byte_tokenizer
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.grammar_walk import InProcessCompiler
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_bert

PARAMS: dict[str, Any] = {
    CHAT.path: ChatParams,
    COMPLETIONS.path: TextParams,
    RESPONSES.path: ResponseCreateParamsStreaming,
    EMBEDDINGS.path: EmbeddingCreateParams,
}
TEMPLATE = (
    "{{ reasoning_effort }}{{ verbosity }}{{ enable_thinking }}"
    "{% if documents %}{{ documents | tojson }}{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
# As long as many tokens, with a stop in it, a thought before and two calls behind.
REPLY = f"<think>\nhm, hm\n</think>\n\nText{CALL}{CALL}"
# What is drawn anew for each answer.
_DRAWN = re.compile(
    r'"(chatcmpl|cmpl|resp|msg|rs|fc|call)[-_][0-9a-f]{16,}"|"(created|created_at|completed_at)":\d+'
)
_NOT_ASKED = ("request_id", "arrival", "spec")


GENERATING = (CHAT, COMPLETIONS, RESPONSES)


@pytest.fixture
def front(make_front: Any, tmp_path: Path) -> Any:
    made = make_front(
        lambda _: REPLY,
        template=TEMPLATE,
        reasoning="qwen3",
        tools="hermes",
        responses=MemoryStore(2**20, 3600),
    )
    compiler = InProcessCompiler(BACKENDS[0], tmp_path, byte_tokenizer(), [EOS_ID])
    made.engine.client.grammars = compiler
    adapters = made.engine.client.adapters
    adapters.is_enabled = True
    adapters.add(Adapter(adapters.next_id(), "x", "x", tmp_path, 4, is_loaded=True))
    return made


async def ask(front: Any, route: Route, body: Mapping[str, Any]) -> httpx.Response:
    # Else one is drawn for each request.
    answer: httpx.Response = await front.post(route.path, {"seed": 3, **body})
    if answer.status_code == 200 and body.get("background") and not body.get("stream"):
        kept = f"{route.path}/{answer.json()['id']}"
        async with front.client() as client, asyncio.timeout(30):
            while (status := (await client.get(kept)).json()["status"]) in (  # noqa: ASYNC110
                "queued",
                "in_progress",
            ):
                # Requests of this client never wait, so nobody else would come to run.
                await asyncio.sleep(0)
        assert status == "completed", body
    return answer


def told(route: Route, answer: httpx.Response) -> Any:
    """What an answer says, without what is drawn anew and, of responses, labels."""
    text = _DRAWN.sub("drawn", answer.text)
    if route is not RESPONSES or answer.headers["content-type"] != "application/json":
        return text
    body = json.loads(answer.text)
    labels = ("output", "status", "store", "model", "tools", "text", "background", "instructions")
    return _DRAWN.sub("drawn", json.dumps({label: body[label] for label in labels}))


def asked_for(front: Any, since: int) -> list[Any]:
    """What the engine was asked."""
    found = []
    for request in front.engine.requests[since:]:
        parts = {
            name: value
            for name, value in msgspec.structs.asdict(request).items()
            if name not in _NOT_ASKED
        }
        spec = msgspec.structs.replace(request.spec, rid="")
        # Whatever the answer is called, its samples are called after it.
        found.append((parts, spec))
    return found


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_every_field_is_on_the_page(route: Route) -> None:
    known = [field.encode_name for field in msgspec.structs.fields(route.body)]
    assert sorted(known) == sorted(route.samples)
    assert set(typing.get_type_hints(PARAMS[route.path])) <= set(known)


async def changes(front: Any, route: Route, name: str) -> bool:
    """Whether a field that is answered makes a difference, to the engine or in the answer."""
    sample = route.samples[name]
    base = {**route.base, **sample.beside}
    found = []
    for body in (base, {**base, name: sample.value}):
        num_asked = len(front.engine.requests)
        answer = await ask(front, route, body)
        assert answer.status_code == 200, (body, answer.text)
        found.append((told(route, answer), asked_for(front, num_asked)))
    return found[0] != found[1]


@needs_grammars
@pytest.mark.parametrize("route", GENERATING, ids=lambda route: route.path)
async def test_fields_do_what_is_said(front: Any, route: Route) -> None:
    wrong: dict[str, bool] = {}
    for name, sample in route.samples.items():
        outcome = route.outcome(name)
        if outcome == "refused" or sample.needs:
            answer = await ask(front, route, {**route.base, **sample.beside, name: sample.value})
            assert answer.status_code == 400, name
            # What is missing may have another name: the session's id, for one.
            assert answer.json()["error"]["param"] == name or sample.needs, (name, answer.text)
        else:
            wrong[name] = await changes(front, route, name) is not (outcome == "effect")
    assert not [name for name, is_wrong in wrong.items() if is_wrong]


@needs_grammars
@pytest.mark.parametrize(
    ("route", "feature"),
    [
        pytest.param(route, feature, id=f"{route.path}-{feature}")
        for route in GENERATING
        for feature in route.features
    ],
)
async def test_fields_beside_others(front: Any, route: Route, feature: str) -> None:
    for name, sample in route.samples.items():
        body = {**route.base, **sample.beside, **route.features[feature], name: sample.value}
        is_refused = route.outcome(name) == "refused" or sample.needs or feature in sample.not_with
        answer = await ask(front, route, body)
        assert answer.status_code == (400 if is_refused else 200), (name, answer.text[:500])


@pytest.mark.slow
def test_embeddings() -> None:
    route = EMBEDDINGS
    with ServerProcess("--model-path", str(tiny_bert("bert"))) as server:
        client = server.wait_ready().client
        plain = client.post(route.path, json=dict(route.base)).json()
        for name, sample in route.samples.items():
            answer = client.post(route.path, json={**route.base, name: sample.value})
            assert answer.status_code == (400 if sample.needs else 200), (name, answer.text)
            # Which request goes first, and what it is called, does not show in one answer.
            silent = route.outcome(name) == "neutral" or name in ("rid", "priority")
            assert sample.needs or (answer.json() == plain) is silent, name
