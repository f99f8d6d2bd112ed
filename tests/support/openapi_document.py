"""Checks requests and answers against a server's OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"


def closed(schema: Any) -> Any:
    """Return the schema with closed objects, so that keys without a description are errors."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if "properties" in found and "required" in found:
        found.setdefault("additionalProperties", False)
    return found


class OpenAPIDocument:
    """The OpenAPI document of a server."""

    def __init__(self, document: dict[str, Any]) -> None:
        """Parse the content of `/openapi.json`."""
        self.document = document
        as_said = Resource(document, DRAFT202012)
        strict = Resource(closed(document), DRAFT202012)
        self._registry = Registry().with_resources([("urn:said", as_said), ("urn:strict", strict)])

    def operations(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield method, path and description of each operation."""
        for path, methods in self.document["paths"].items():
            for method, operation in methods.items():
                yield method.upper(), path, operation

    def body_of(self, operation: dict[str, Any]) -> dict[str, Any] | None:
        """Return the schema of an operation's JSON body, without a reference at its top."""
        if JSON not in operation.get("requestBody", {}).get("content", ()):
            return None
        schema = operation["requestBody"]["content"][JSON]["schema"]
        found: dict[str, Any] = self.resolve(schema)
        return found

    def resolve(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the schema to which references lead."""
        while "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return schema

    def check_body(self, method: str, path: str, body: Any) -> None:
        """Check the body of a request against the document."""
        self._validate(body, "urn:said", path, method.lower(), "requestBody", "content", JSON)

    def check(self, method: str, path: str, answer: httpx.Response) -> None:
        """Check the status, media type and content of an answer against the document."""
        responses = self.document["paths"][path][method.lower()]["responses"]
        status = str(answer.status_code)
        where = f"{method} {path} {status}: {answer.text[:500]}"
        assert status in responses, where
        content = responses[status].get("content")
        if content is None:
            assert answer.content == b"", where
            assert "content-type" not in answer.headers, where
            return
        media = answer.headers["content-type"].partition(";")[0]
        assert media in content, where
        place = ("urn:strict", path, method.lower(), "responses", status, "content", media)
        if media == EVENTS:
            *events, rest = answer.text.split("\n\n")
            assert rest == "", where
            if not events[0].startswith("event: "):
                assert events.pop() == "data: [DONE]", where
            for event in events:
                name, _, data = event.rpartition("data: ")
                content = json.loads(data)
                assert not name or name == f"event: {content['type']}\n", where
                self._validate(content, *place)
        elif media == LINES:
            for line in answer.text.splitlines():
                self._validate(json.loads(line), *place)
        elif media == JSON:
            self._validate(answer.json(), *place)
        else:
            assert content[media]["schema"] == {"type": "string"}, where

    def _validate(self, value: Any, document: str, *place: str) -> None:
        steps = "/".join(step.replace("~", "~0").replace("/", "~1") for step in place)
        schema = {"$ref": f"{document}#/paths/{steps}/schema"}
        error = best_match(Draft202012Validator(schema, registry=self._registry).iter_errors(value))
        assert error is None, f"{place}: {error.json_path}: {error.message[:500]}"


def numbers(document: OpenAPIDocument, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the alternatives of a field that are numbers with limits."""
    schema = document.resolve(schema)
    for each in schema.get("anyOf", [schema]):
        bounds = {"minimum", "maximum", "exclusiveMinimum"} & each.keys()
        if each.get("type") in ("integer", "number") and bounds:
            yield each


def beyond(schema: dict[str, Any]) -> Iterator[float]:
    step = 1 if schema["type"] == "integer" else 0.5
    if "minimum" in schema:
        yield schema["minimum"] - step
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"]
    if "maximum" in schema:
        yield schema["maximum"] + step


def inside(schema: dict[str, Any]) -> Iterator[float]:
    if "minimum" in schema:
        yield schema["minimum"]
    if "maximum" in schema:
        yield schema["maximum"]


def bounded(
    document: OpenAPIDocument, tags: set[str]
) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield path, place in the body, name and schema of every number with limits."""
    for method, path, operation in document.operations():
        body = document.body_of(operation)
        if body is None or method != "POST" or not tags & set(operation["tags"]):
            continue
        for name, schema in body["properties"].items():
            for each in numbers(document, schema):
                yield path, "", name, each
            for alternative in schema.get("anyOf", ()):
                inner = document.resolve(alternative)
                for deep, below in inner.get("properties", {}).items():
                    for each in numbers(document, below):
                        yield path, name, deep, each
