"""Null means absent, in each field of each body of each route, at any depth."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi.routing import APIRoute
from msgspec import inspect

from openai_api.chat_tools import CustomSpec
from openai_api.schemas.chat import FunctionTool
from openai_api.schemas.responses import Item
from runtime.eventloop.json_body import decode_body
from runtime.service.operation import JSON, OPERATION_KEY, Operation
from tests.support.fake_server import FakeServer
from tests.unit.server.test_openapi import NEEDED

# What is decoded as an object, and checked later.
LATER = (FunctionTool, CustomSpec, *typing.get_args(Item))
# There null is said on purpose: as many tokens as fit.
SAID = {("SamplingFields", "max_new_tokens")}


@pytest.fixture
async def server(tmp_path: Path) -> FakeServer:
    return FakeServer(tmp_path)


def routes_of(server: FakeServer) -> Iterator[tuple[str, Operation]]:
    for route in server.app.api.routes:
        if isinstance(route, APIRoute):
            said: Operation | None = (route.openapi_extra or {}).get(OPERATION_KEY)
            if said is not None and said.body is not None and said.media == JSON:
                yield route.path, said


def least(info: inspect.Type) -> Any:
    """A value of a type, with nothing in it that may be left out."""
    match info:
        case inspect.Metadata():
            return least(info.type)
        case inspect.UnionType():
            return least(next(each for each in info.types if each != inspect.NoneType()))
        case inspect.StructType():
            tag = {} if info.tag_field is None else {info.tag_field: info.tag}
            needed = (each for each in info.fields if each.required)
            return tag | {each.encode_name: least(each.type) for each in needed}
        case inspect.LiteralType():
            return info.values[0]
        case inspect.CollectionType():
            return []
        case inspect.DictType():
            return {}
        case inspect.BoolType():
            return True
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.BytesType():
            return ""
    return "a"


def structs_in(info: inspect.Type, seen: set[type]) -> Iterator[inspect.StructType]:
    match info:
        case inspect.Metadata():
            yield from structs_in(info.type, seen)
        case inspect.UnionType():
            for each in info.types:
                yield from structs_in(each, seen)
        case inspect.CollectionType():
            yield from structs_in(info.item_type, seen)
        case inspect.DictType():
            yield from structs_in(info.value_type, seen)
        case inspect.StructType() if info.cls not in seen:
            seen.add(info.cls)
            yield info
            for field in info.fields:
                yield from structs_in(field.type, seen)


async def test_in_every_field_null_is_as_good_as_nothing(server: FakeServer) -> None:
    seen: set[type] = set()
    bodies = [said.body for _, said in routes_of(server)]
    found = [
        each for body in (*bodies, *LATER) for each in structs_in(inspect.type_info(body), seen)
    ]
    assert len(found) > 80
    wrong = []
    for info in found:
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(info.cls)
        bare = least(info)
        plain = decode_body(json.dumps(bare).encode(), decoder)
        for field in info.fields:
            if field.required or (info.cls.__name__, field.name) in SAID:
                continue
            body = json.dumps({**bare, field.encode_name: None}).encode()
            try:
                is_absent = decode_body(body, decoder) == plain
            except Exception:  # all that are wrong are told at once
                is_absent = False
            if not is_absent:
                wrong.append((info.cls.__name__, field.name))
    assert not wrong


async def test_every_route_takes_null_for_nothing(server: FakeServer) -> None:
    asked = 0
    for path, said in routes_of(server):
        if path not in NEEDED:
            continue
        bare = NEEDED[path]
        status = (await server.client.post(path, json=bare)).status_code
        for field in msgspec.structs.fields(said.body):
            if field.encode_name in bare:
                continue
            answer = await server.client.post(path, json={**bare, field.encode_name: None})
            assert answer.status_code == status, (path, field.encode_name, answer.text)
            asked += 1
    assert asked > 250


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": None}]}),
        (
            "/api/chat",
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"function": {"name": "f", "arguments": None}}],
                    },
                    {"role": "tool", "content": "b", "tool_name": None},
                ]
            },
        ),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
)
async def test_nulls_within_a_conversation(
    server: FakeServer, path: str, body: dict[str, Any]
) -> None:
    answer = await server.client.post(path, json={**NEEDED[path], **body})
    assert answer.status_code == 200, answer.text


def test_what_is_needed_stays_needed() -> None:
    class Body(msgspec.Struct):
        needed: str
        inner: dict[str, str] = {}

    decoder = msgspec.json.Decoder(Body)
    for body in (b'{"needed": null}', b'{"needed": "a", "inner": {"b": null}}'):
        with pytest.raises(Exception, match="got `null`"):
            decode_body(body, decoder)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_errors_of_a_ranking_name_its_route(tmp_path, path):
    body = {"query": "a", "documents": ["b"]}
    answer = await FakeServer(tmp_path).client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["message"].startswith(f"{path} needs a model that scores pairs")
