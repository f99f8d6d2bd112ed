"""Bodies made at random from the OpenAPI document, to every clients' route, beside greedy streams.

HEADRACE_FAULT_ROUNDS=20 gives the long form.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.faults.test_kill import ROUNDS
from tests.support.native import until_idle
from tests.support.neighbours import Neighbours, greedy
from tests.support.openapi_document import OpenAPIDocument
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model
from tests.unit.server.test_access import ADMIN

NUM_BODIES = 3
# One of so many values is none that the schema allows.
JUNK_EVERY = 12
JUNK = [None, True, -1, 0, 2**31, 2**63, 10**400, 1e308, -0.5, "", "\0", "x" * 3000, [], {}]
JUNK += [[None], [[1]], [1.5], {"a": {"b": []}}, {"type": 5}, "<|im_end|>", "\U0001f469\u200d"]
TEXTS = ["a", "The mill", "", "\0", "日本", "<|im_end|>", "text", "user", "auto", "none", "json"]


class Bodies:
    """Draws values that a schema describes, and now and then others."""

    def __init__(self, document: OpenAPIDocument, seed: int) -> None:
        self._document = document
        self._random = random.Random(seed)

    def draw(self, schema: dict[str, Any], depth: int = 0) -> Any:
        choose = self._random.choice
        if depth > 5 or (depth and self._random.randrange(JUNK_EVERY) == 0):
            return choose(JUNK)
        schema = self._document.resolve(schema)
        for kind in ("anyOf", "oneOf", "allOf"):
            if kind in schema:
                return self.draw(choose(schema[kind]), depth)
        if "enum" in schema:
            return choose(schema["enum"])
        match schema.get("type"):
            case "string":
                return choose(TEXTS)
            case "integer":
                return choose([0, 1, 2, 3])
            case "number":
                return choose([0, 0.5, 1, -1.5, 2])
            case "boolean":
                return choose([True, False])
            case "array":
                items = schema.get("items") or {}
                return [self.draw(items, depth + 1) for _ in range(self._random.randrange(4))]
            case "object":
                return self._object(schema, depth)
        return choose(JUNK)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        required = set(schema.get("required", ()))
        known = schema.get("properties", {})
        # Of bodies with many fields hardly any would be taken.
        others = [name for name in known if name not in required]
        some = self._random.sample(others, min(len(others), self._random.randrange(3)))
        names = [name for name in known if name in required or name in some]
        return {name: self.draw(known[name], depth + 1) for name in names}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model-path", str(tiny_model("qwen3"))) as server:
        yield server.wait_ready()


def test_each_is_answered_or_refused_and_streams_keep_their_text(server: ServerProcess) -> None:
    solo = greedy(server)
    document = OpenAPIDocument(server.client.get("/openapi.json").json())
    bodies = Bodies(document, 0)
    requests = [
        (path, json.dumps(bodies.draw(schema)))
        for method, path, operation in document.operations()
        if method == "POST" and path not in ADMIN
        if (schema := document.body_of(operation)) is not None
        for _ in range(NUM_BODIES * ROUNDS)
    ]
    assert len({path for path, _ in requests}) > 15

    def send(request: tuple[str, str]) -> int:
        path, body = request
        headers = {"content-type": "application/json"}
        answer = httpx.post(server.url + path, content=body, headers=headers, timeout=120)
        assert answer.status_code < 500, (path, body[:1000], answer.text[:1000])
        return answer.status_code

    with Neighbours(server) as neighbours, ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(send, requests))
    # Both sorts were among them.
    assert {200, 400} <= set(statuses)
    assert set(neighbours.texts) == {solo}
    until_idle(server)
    assert "Traceback" not in server.log
