"""Dynamo 1.6.1: its frontend and router before workers of ours, and how requests are translated."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from benchmarks.dynamo import environment
from tests.clients.scenarios import CAPITAL, MODEL, need, succeed
from tests.support.fake_engine import FakeEngine
from tests.support.fake_service import fake_service
from tests.support.server import free_port, python_path
from tests.support.waiting import until

need("dynamo.llm", "dynamo")

from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument  # noqa: E402

from headrace.dynamo.backend import Backend  # noqa: E402
from headrace.dynamo.request_fields import read_request, translate  # noqa: E402
from runtime.config.options import ServerConfig  # noqa: E402
from runtime.errors import EngineDead, HeadraceError, InvalidRequest, Overloaded  # noqa: E402

CHAT = {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": CAPITAL}]}


class Frontend:
    """A frontend that routes by prefix, with two workers, and their logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        worker = ["headrace.dynamo", "--model-path", MODEL, "--num-threads", "1"]
        frontend = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self.port)]
        for number, words in enumerate([worker, worker, [*frontend, "--router-mode", "kv"]]):
            with (folder / f"{number}.log").open("w") as log:
                command = [sys.executable, "-m", *words]
                variables = {**environment(folder), "PYTHONPATH": python_path()}
                process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
                self.processes.append(process)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    @property
    def num_workers(self) -> int:
        """How many workers the frontend knows."""
        try:
            found = self.client.get("/health").json().get("instances", [])
        except (httpx.TransportError, ValueError):
            return 0
        return sum(each["endpoint"] == "generate" for each in found)

    def log(self, number: int) -> str:
        return (self.folder / f"{number}.log").read_text()

    def is_ready(self) -> bool:
        return self.num_workers == 2 and bool(self.client.get("/v1/models").json()["data"])

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes[:2]:
            process.wait(60)
        self.processes[2].kill()
        self.processes[2].wait()


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    started = Frontend(tmp_path_factory.mktemp("dynamo"))
    try:
        until(started.is_ready, 120)
        yield started
    finally:
        started.stop()


def chat(frontend: Frontend, **fields: Any) -> dict[str, Any]:
    answer = frontend.client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_chats_whole_and_streamed(frontend: Frontend) -> None:
    choice = chat(frontend)["choices"][0]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
    body = {**CHAT, "stream": True}
    with frontend.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == choice["message"]["content"]
    assert len(deltas) > 1


def test_limits_and_log_probabilities(frontend: Frontend) -> None:
    (choice,) = chat(frontend, max_tokens=3, logprobs=True, top_logprobs=2)["choices"]
    assert choice["finish_reason"] == "length"
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


@pytest.mark.parametrize(
    ("fields", "why"), [({"max_tokens": 10**6}, "context"), ({"n": 2, "temperature": 1}, "n must")]
)
def test_a_mistake_is_a_400_with_its_reason(
    frontend: Frontend, fields: dict[str, Any], why: str
) -> None:
    refused = frontend.client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert refused.status_code == 400
    assert why in refused.json()["message"]


def test_a_schema_is_kept(frontend: Frontend) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    text = chat(frontend, response_format=form, max_tokens=60)["choices"][0]["message"]["content"]
    assert json.loads(text) == {"city": "Oslo"}


def test_the_router_knows_what_is_cached(frontend: Frontend) -> None:
    """It learns this from the events alone, and sends all turns to one worker."""
    asked = {"messages": [{"role": "user", "content": "The miller opens the gate. " * 30}]}
    chat(frontend, **asked, max_tokens=2)

    def overlap() -> int:
        usage = chat(frontend, **asked, max_tokens=2)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 100
        return int(re.findall(r"overlap_blocks=(\d+)", frontend.log(2))[-1])

    until(lambda: overlap() > 6, 20)


def test_a_request_whose_client_leaves_is_ended(frontend: Frontend) -> None:
    most = 1900
    body = {**CHAT, "stream": True, "max_tokens": most, "ignore_eos": True}
    with frontend.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())

    def aborted() -> list[str]:
        text = frontend.log(0) + frontend.log(1)
        return re.findall(r"Request \S+ was aborted after (\d+) tokens", text)

    until(aborted, 30)
    (num_tokens,) = map(int, aborted())
    assert 0 < num_tokens < most


class LeavingContext:
    """A request of Dynamo whose client leaves as soon as the worker has read the request."""

    def __init__(self, backend: HeldBackend) -> None:
        self._backend = backend
        self._has_left = False

    def id(self) -> str:
        if not self._has_left:
            self._has_left = True
            # Dynamo aborts in a task of its own. Here it does before the request is admitted.
            with contextlib.suppress(StopIteration):
                self._backend.abort(self).send(None)
        return "leaving"

    def is_stopped(self) -> bool:
        return self._has_left

    def is_killed(self) -> bool:
        return False


class HeldBackend(Backend):
    """A backend over an engine that generates nothing until it is told to abort."""

    def __init__(self, engine: FakeEngine, folder: Path) -> None:
        super().__init__(ServerConfig(), folder)
        self._context = fake_service(engine)


async def test_a_client_that_leaves_during_admission(tmp_path: Path) -> None:
    engine = FakeEngine(hold="wait")
    backend = HeldBackend(engine, tmp_path)
    ids = engine.tokenizer.encode("wait", add_special_tokens=False)
    async with asyncio.timeout(10):
        answer = backend.generate({"token_ids": ids}, LeavingContext(backend))
        chunks = [chunk async for chunk in answer]
    assert [chunk.get("finish_reason") for chunk in chunks] == ["cancelled"]
    (request,) = engine.requests
    assert engine.aborted == {request.request_id}


def test_one_is_killed_and_one_drained() -> None:
    succeed([sys.executable, "-m", "benchmarks.dynamo", "--requests", "80"])


@pytest.mark.parametrize(
    ("guided", "kept"),
    [
        ({"json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["a.b", "c"]}, {"regex": r"a\.b|c"}),
        ({"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"structural_tag": {"a": 1}}, {"structural_tag": '{"a": 1}'}),
        ({}, {}),
    ],
)
def test_constraints_become_ours(guided: dict[str, Any], kept: dict[str, str]) -> None:
    request = {"token_ids": [5], "sampling_options": {"guided_decoding": guided}}
    params = read_request(request).sampling_params
    found = msgspec.to_builtins(params)
    kinds = ("json_schema", "regex", "ebnf", "structural_tag")
    assert {kind: found[kind] for kind in kinds if found[kind] is not None} == kept


def test_limits_become_ours() -> None:
    stop = {"max_tokens": None, "stop_token_ids": [3], "stop_token_ids_hidden": [2, 3]}
    sampling = {"temperature": 0.5, "seed": 7, "top_k": -1, "length_penalty": 1.0}
    request = {"token_ids": [5, 6], "stop_conditions": stop, "sampling_options": sampling}
    body = read_request(request)
    params: Any = body.sampling_params
    assert body.input_ids == [5, 6]
    assert params.max_new_tokens is None
    assert (params.stop_token_ids, params.sampling_seed, params.temperature) == ([2, 3], 7, 0.5)
    with pytest.raises(InvalidRequest, match="Images"):
        read_request({"token_ids": [5], "multi_modal_data": {"image_url": ["x"]}})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("why"), InvalidArgument),
        (EngineDead("why"), EngineShutdown),
        (Overloaded("why"), HttpError),
    ],
)
def test_an_error_is_one_of_theirs(error: HeadraceError, kind: type[Exception]) -> None:
    found = translate(error)
    assert type(found) is kind
    assert "why" in str(found)
