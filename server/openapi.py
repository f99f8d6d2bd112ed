"""Builds the OpenAPI document of all routes from the types of their bodies and answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from anthropic_api.message_answers import AnthropicErrorBody
from ollama_api.ollama_answers import OllamaErrorBody
from openai_api.openai_errors import OpenAIErrorBody
from runtime.config.options import HttpArgs
from runtime.service.operation import OPERATION_KEY, REFERENCE, Content, Operation
from server.access import Access
from server.dialect import Dialect
from server.error_responses import ErrorBody, KeyRefusedBody, RefusedBody
from server.routing import RouteMatch

_WRITING = frozenset({"POST", "PUT", "DELETE"})
# For each access level, two schemes that carry its key (a bearer token, and the header of
# Anthropic's clients), and the options that set the key.
_SCHEMES = {
    Access.KEY: ("ApiKey", "ApiKeyHeader", "--api-key"),
    Access.ADMIN: ("AdminKey", "AdminKeyHeader", "--admin-api-key; if it is not set, --api-key"),
}
_ERROR_HEADERS = {
    401: ("WWW-Authenticate", "Bearer"),
    503: ("Retry-After", "seconds, where asking again may help"),
}


class Description(FastAPI):
    """The FastAPI object that describes all routes in one document; it serves no requests."""

    def __init__(self, version: str, http: HttpArgs) -> None:
        """Start without routes."""
        has_docs = not http.disable_docs
        super().__init__(
            title="Headrace",
            version=version,
            openapi_url="/openapi.json" if has_docs else None,
            # FastAPI's own page would load scripts from another host.
            docs_url=None,
            redoc_url=None,
        )
        self._http = http
        self._described: list[_Route] = []

    def describe(self, route: BaseRoute, match: RouteMatch) -> None:
        """Add a route to the document, unless it is excluded from it.

        Args:
            route: the route.
            match: its access level and API.

        Raises:
            TypeError: the route does not declare its inputs and answers.
        """
        self.router.routes.append(route)
        if isinstance(route, APIRoute) and route.include_in_schema:
            self._described.append(_Route(route, match))

    def openapi(self) -> dict[str, Any]:
        """Return the document, which is built at the first call."""
        if self.openapi_schema is None:
            self.openapi_schema = self._document()
        return self.openapi_schema

    def _document(self) -> dict[str, Any]:
        kinds = [kind for route in self._described for kind in route.kinds()]
        schemas = _Schemas(kinds)
        paths: dict[str, dict[str, Any]] = {}
        for route in self._described:
            methods = paths.setdefault(route.api.path_format, {})
            for method in route.methods:
                # If several routes have the same path and method, the first one is described.
                methods.setdefault(
                    method.lower(),
                    {
                        **route.document(method, schemas),
                        "security": self._security(route.match),
                    },
                )
        return {
            "openapi": "3.1.0",
            "info": {
                "title": self.title,
                "version": self.version,
                "description": "Routes that answer GET answer HEAD too, except admin routes.",
            },
            "paths": paths,
            "components": {"schemas": schemas.components, "securitySchemes": _security_schemes()},
        }

    def _security(self, match: RouteMatch) -> list[dict[str, list[str]]]:
        access = match.access
        if access is Access.OPEN:
            return []
        levels = [access]
        if match.serves_tenants and self._http.api_keys_file:
            levels.append(Access.KEY)
        schemes = [scheme for level in levels for scheme in _SCHEMES[level][:2]]
        needed: list[dict[str, list[str]]] = [{scheme: []} for scheme in schemes]
        admin_key = self._http.admin_api_key if access is Access.ADMIN else None
        # If no key is set, a request without one (`{}`) is allowed as well.
        return needed if self._http.api_key or admin_key else [{}, *needed]


class _Schemas:
    """The JSON schemas of types; types with a name are referenced."""

    def __init__(self, kinds: list[Any]) -> None:
        """Generate the schemas of `kinds` and of the types that they contain."""
        # Schemas are found by `_key`, because equal types may be different objects: each
        # `list[int]` is a new one.
        schemas, self.components = msgspec.json.schema_components(
            kinds,
            # A field of type `object` accepts anything; msgspec wants a schema for it.
            schema_hook=lambda _: {"description": "any JSON value"},
            ref_template=REFERENCE,
        )
        for schema in self.components.values():
            if "description" in schema:
                schema["description"] = inspect.cleandoc(schema["description"])
        self._by_kind = {_key(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}

    def of(self, *kinds: Any) -> dict[str, Any]:
        """Return the schema of a value whose type is one of `kinds`."""
        schemas = [self._by_kind[_key(kind)] for kind in kinds]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _key(kind: Any) -> Any:
    # `Annotated` types are compared by their text, because comparing them would compare their
    # metadata, which msgspec's metadata does not support.
    return kind if isinstance(kind, type) else repr(kind)


class _Route:
    """A route as the document describes it: its declaration, access level and API."""

    def __init__(self, route: APIRoute, match: RouteMatch) -> None:
        self.api = route
        self.match = match
        self.methods = sorted(route.methods or ())
        self._operation = _operation_of(route)

    def kinds(self) -> Iterator[Any]:
        """Yield every type in the route's body, query and answers."""
        if self._operation.body is not None:
            yield self._operation.body
        yield from self._operation.mentions
        for query in self._operation.query:
            yield query.kind
        for method in self.methods:
            for content in self._responses(method).values():
                for kinds in content.values():
                    yield from kinds

    def document(self, method: str, schemas: _Schemas) -> dict[str, Any]:
        """Return the OpenAPI operation object for one method of the route."""
        said = self._operation
        description = self.api.description
        name = re.sub(r"\W", "_", f"{self.api.name}{self.api.path_format}")
        found: dict[str, Any] = {
            "tags": self.api.tags,
            "summary": self.api.summary or description.partition("\n")[0].rstrip("."),
            "description": description,
            "operationId": f"{name}_{method.lower()}",
        }
        parameters = [
            {"name": each, "in": "path", "required": True, "schema": {"type": "string"}}
            for each in self.api.param_convertors
        ]
        parameters += [
            {
                "name": each.name,
                "in": "query",
                "required": each.required,
                "description": each.description,
                "schema": schemas.of(each.kind),
            }
            for each in said.query
        ]
        if parameters:
            found["parameters"] = parameters
        if said.body is not None and method in _WRITING:
            found["requestBody"] = {
                "required": not said.body_may_be_absent,
                "content": _content({said.media: (said.body,)}, schemas),
            }
        found["responses"] = {
            str(status): _response(status, content, schemas)
            for status, content in sorted(self._responses(method).items())
        }
        return found

    def _responses(self, method: str) -> dict[int, Content]:
        said = self._operation
        found: dict[int, Content] = dict(said.answers)
        for status in self._errors(method):
            mine = found.get(status, {})
            known = mine.get("application/json", ())
            found[status] = {
                **mine,
                "application/json": tuple(dict.fromkeys((*known, *self._error_bodies(status)))),
            }
        return found

    def _errors(self, method: str) -> set[int]:
        found = {500, *self._operation.refuses}
        if self.match.access is not Access.OPEN:
            found.add(401)
        if self.match.access is Access.ADMIN or method in _WRITING:
            # A 403 means that the API key was sent to an admin route, or that a page of another
            # origin sent the request.
            found.add(403)
        if method in _WRITING:
            found |= {400, 413, 415}
            if self._operation.body is not None:
                found.add(503)
        return found

    def _error_bodies(self, status: int) -> tuple[Any, ...]:
        if self.match.dialect is Dialect.ANTHROPIC:
            return (AnthropicErrorBody,)
        if self.match.dialect is Dialect.OLLAMA:
            return (OllamaErrorBody,)
        if self.match.dialect is Dialect.OPENAI:
            return (OpenAIErrorBody,)
        return _NATIVE_ERRORS.get(status, (ErrorBody,))


def _operation_of(route: APIRoute) -> Operation:
    """Return what `route` declares of its inputs and answers.

    Raises:
        TypeError: the route declares nothing.
    """
    found = (route.openapi_extra or {}).get(OPERATION_KEY)
    if not isinstance(found, Operation):
        raise TypeError(
            f"{route!r} does not declare its input and output: openapi_extra=operation(...)"
        )
    return found


_NATIVE_ERRORS: Mapping[int, tuple[Any, ...]] = {
    400: (RefusedBody, ErrorBody),
    401: (KeyRefusedBody,),
    403: (KeyRefusedBody, ErrorBody),
}


def _response(status: int, content: Content, schemas: _Schemas) -> dict[str, Any]:
    found: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if status in _ERROR_HEADERS:
        name, what = _ERROR_HEADERS[status]
        found["headers"] = {name: {"description": what, "schema": {"type": "string"}}}
    if content:
        found["content"] = _content(content, schemas)
    return found


def _content(content: Content, schemas: _Schemas) -> dict[str, Any]:
    return {media: {"schema": schemas.of(*kinds)} for media, kinds in content.items()}


def _security_schemes() -> dict[str, Any]:
    schemes: dict[str, Any] = {}
    for bearer, header, option in _SCHEMES.values():
        schemes[bearer] = {"type": "http", "scheme": "bearer", "description": option}
        schemes[header] = {
            "type": "apiKey",
            "in": "header",
            "name": "x-api-key",
            "description": option,
        }
    return schemes
