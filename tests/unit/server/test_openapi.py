"""The OpenAPI document over a fake engine: form, bodies and bounds, refusals of each route."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec
import openapi_spec_validator
import pytest
from fastapi.routing import APIRoute

from runtime.config.options import LoggingArgs
from server.access import Access
from server.routing import RouteMatch
from tests.support.fake_server import FakeServer
from tests.support.openapi_document import OpenAPIDocument, beyond, bounded, inside

USER = {"authorization": "Bearer USER"}
ADMIN = {"authorization": "Bearer ADMIN"}
# What a body needs beside the field that is looked at.
NEEDED: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/invocations": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
    "/api/chat": {"model": "m", "stream": False, "messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"model": "m", "stream": False, "prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/batches": {
        "input_file_id": "file-a",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    "/encode": {"text": "a"},
    "/classify": {"text": "a"},
    "/v1/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    "/explain_cache": {"body": {"messages": [{"role": "user", "content": "a"}]}},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/api/embed": {"model": "m", "input": "a"},
    "/api/embeddings": {"model": "m", "prompt": "a"},
    "/open_session": {"capacity_of_str_len": 10},
    "/separate_reasoning": {"text": "a", "reasoning_parser": "qwen3"},
    "/parse_function_call": {"text": "a", "tools": [], "tool_call_parser": "hermes"},
}
# What a field needs beside it.
BESIDE = {
    "logprob_start_len": {"return_logprob": True},
    "top_logprobs_num": {"return_logprob": True},
    "top_logprobs": {"logprobs": True},
    # Nothing may be generated where the prompt is echoed.
    "max_tokens": {"echo": True},
}
# What an object in a body needs beside the field that is looked at.
INSIDE = {"output_expires_after": {"anchor": "created_at"}}


@pytest.fixture
async def server(tmp_path: Path) -> FakeServer:
    return FakeServer(tmp_path, logging=LoggingArgs(enable_metrics=True))


@pytest.fixture
async def document(server: FakeServer) -> OpenAPIDocument:
    return OpenAPIDocument((await server.client.get("/openapi.json")).json())


def with_keys(folder: Path) -> FakeServer:
    logging = LoggingArgs(enable_metrics=True)
    return FakeServer(folder, logging=logging, api_key="USER", admin_api_key="ADMIN")


def matches(server: FakeServer, document: OpenAPIDocument) -> Iterator[tuple[str, str, RouteMatch]]:
    for method, path, _ in document.operations():
        scope = {"type": "http", "method": method, "path": path, "headers": []}
        yield method, path, server.app.routes.resolve(scope)


async def test_it_is_valid_and_small_enough_to_read(document):
    openapi_spec_validator.validate(document.document)
    assert document.document["openapi"].startswith("3.1")
    names = [operation["operationId"] for _, _, operation in document.operations()]
    assert len(set(names)) == len(names)


async def test_a_metrics_prefix_that_is_refused_is_documented(server, document):
    answer = await server.client.get("/metrics", params={"prefix": "1"})
    assert answer.status_code == 400
    responses = next(op for _, path, op in document.operations() if path == "/metrics")["responses"]
    assert "400" in responses


def routes_of(server):
    """All but the pages for people."""
    routes = [route for route in server.app.api.routes if isinstance(route, APIRoute)]
    return [route for route in routes if not route.path.startswith(("/docs", "/page/"))]


async def test_every_route_is_in_it(server, document):
    documented = {(method, path) for method, path, _ in document.operations()}
    routes = routes_of(server)
    registered = {(method, route.path_format) for route in routes for method in route.methods}
    assert documented == registered
    # What is no route of ours.
    others = {route.path for route in server.app.api.routes if not isinstance(route, APIRoute)}
    assert others == {"/openapi.json"}


async def test_every_route_says_what_it_is(document):
    schemas = document.document["components"]["schemas"]
    for method, path, operation in document.operations():
        where = f"{method} {path}"
        assert operation["tags"], where
        assert operation["summary"], where
        assert operation["description"], where
        for name in operation["responses"]["500"]["content"]["application/json"]["schema"].values():
            assert name.rpartition("/")[2] in schemas, where


async def test_a_route_that_says_nothing_is_not_taken(server):
    async def silent() -> None: ...

    match = next(iter(matches(server, OpenAPIDocument(server.app.api.openapi()))))[2]
    with pytest.raises(TypeError, match="does not declare its input and output"):
        server.app.api.describe(APIRoute("/silent", silent, methods=["GET"]), match)


async def test_keys_are_as_the_route_declares_them(tmp_path):
    server = with_keys(tmp_path)
    found = await server.client.get("/openapi.json", headers=USER)
    document = OpenAPIDocument(found.json())
    wanted = {
        Access.OPEN: [],
        Access.KEY: [{"ApiKey": []}, {"ApiKeyHeader": []}],
        Access.ADMIN: [{"AdminKey": []}, {"AdminKeyHeader": []}],
    }
    for method, path, match in matches(server, document):
        operation = document.document["paths"][path][method.lower()]
        assert operation["security"] == wanted[match.access], path
        if match.access is not Access.OPEN:
            answer = await server.client.request(method, path)
            assert answer.status_code == 401, path
            document.check(method, path, answer)
        if match.access is Access.ADMIN:
            answer = await server.client.request(method, path, headers=USER)
            assert answer.status_code == 403, path
            document.check(method, path, answer)


async def test_refusals_before_the_route_are_as_described(server, document):
    refusals = {
        400: {"content": b"{"},
        403: {"headers": {"origin": "https://elsewhere.example"}},
        413: {"headers": {"content-length": str(2**40)}},
        415: {"headers": {"content-encoding": "gzip"}},
    }
    for method, path, operation in document.operations():
        for status, sent in refusals.items():
            if status == 400 and "requestBody" not in operation:
                continue
            if method == "GET" and (status != 403 or "403" not in operation["responses"]):
                continue
            headers = {"content-type": "application/json", **sent.get("headers", {})}
            answer = await server.client.request(
                method, path, content=sent.get("content", b"{}"), headers=headers
            )
            assert answer.status_code == status, f"{method} {path}: {answer.text}"
            document.check(method, path, answer)


async def test_a_failure_of_ours_is_as_described(server, document):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("on purpose")

    server.context.client.calls.control = fail
    server.context.client.generate = fail
    for path, body in (("/freeze_gc", None), ("/generate", {"text": "a"})):
        answer = await server.client.post(path, json=body)
        assert answer.status_code == 500
        document.check("POST", path, answer)


def decoders_of(function: Any, seen: set[Any]) -> Iterator[Any]:
    """Types of the JSON decoders that a handler of ours names, and what it calls that is inside."""
    if not isinstance(function, FunctionType) or function in seen:
        return
    seen.add(function)
    closure = inspect.getclosurevars(function)
    for value in (*closure.nonlocals.values(), *closure.globals.values()):
        if isinstance(value, msgspec.json.Decoder):
            yield value.type
        elif value in closure.nonlocals.values() or _is_near(value, function):
            yield from decoders_of(value, seen)


def _is_near(value: Any, function: FunctionType) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == function.__module__


async def test_what_decodes_a_body_is_what_is_described(server, document):
    routes = routes_of(server)
    num_bodies = 0
    for route in routes:
        kinds = set(decoders_of(route.endpoint, set()))
        for method in route.methods:
            operation = document.document["paths"][route.path_format][method.lower()]
            body = document.body_of(operation)
            if body is None:
                assert not kinds or method == "GET", route.path
                continue
            num_bodies += 1
            assert len(kinds) == 1, (route.path, kinds)
            (kind,) = kinds
            fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
            assert body["title"] == kind.__name__, route.path
            assert body["properties"].keys() == fields.keys(), route.path
            required = {name for name, field in fields.items() if field.required}
            assert set(body["required"]) == required, route.path
    assert num_bodies > 35


async def test_bounds_are_those_of_the_code(server, document):
    checked = set()
    for path, outer, name, schema in bounded(document, {"native", "OpenAI", "control"}):
        needed = {**NEEDED.get(path, {}), **BESIDE.get(name, {})}
        if path == "/v1/classify":
            # Refused before its fields are looked at: this model generates.
            continue

        async def ask(value: float, path=path, outer=outer, name=name, needed=needed) -> Any:
            field = {outer: {**INSIDE.get(outer, {}), name: value}} if outer else {name: value}
            return await server.client.post(path, json={**needed, **field})

        for value in beyond(schema):
            answer = await ask(value)
            assert answer.status_code == 400, (path, name, value, answer.text)
            assert name in answer.text, (path, value, answer.text)
        is_control = "control" in document.document["paths"][path]["post"]["tags"]
        # The fake engine obeys no commands.
        for value in () if is_control else inside(schema):
            answer = await ask(value)
            assert answer.status_code != 500, (path, name, value, answer.text)
            refused = answer.status_code == 400 and f"{name} must be" in answer.text
            # So many tokens are allowed, but not beside so few others.
            too_long = name.startswith("min_") and value > 0
            assert not refused or too_long, (path, value, answer.text)
        checked.add((path, name))
    assert len(checked) > 60


async def test_a_wrong_type_in_any_field_is_refused_by_its_name(server, document):
    for method, path, operation in document.operations():
        body = document.body_of(operation)
        if body is None or method != "POST":
            continue
        for name, schema in body["properties"].items():
            kinds = schema.get("anyOf", [schema])
            if not all({"type", "$ref", "enum"} & each.keys() for each in kinds):
                # Anything may stand there.
                continue
            wrong = {**NEEDED.get(path, {}), name: [[[None]]] if "anyOf" in schema else {"a": 1}}
            if schema.get("type") == "object":
                wrong[name] = 1.5
            answer = await server.client.post(path, json=wrong)
            assert answer.status_code == 400, (path, name, answer.text)
            assert f"$.{name}" in json.dumps(answer.json()), (path, name, answer.text)
