"""Finds the route of a request, before any other decision about the request.

Access level, error format, metrics label and handler all come from this one match, so paths are
compared nowhere else. Routes are declared with FastAPI, which documents them, but requests do not
pass through FastAPI.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import cast, get_type_hints

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from server.absent_routes import instead_of
from server.accept import prefers_html
from server.access import Access
from server.dialect import Dialect
from server.error_responses import HttpRefusal, MethodNotAllowed, RouteNotFound, error_response

Endpoint = Callable[[Request], Awaitable[ASGIApp]]

_READING = frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """The route of a request.

    Attributes:
        path: the path as registered; None if no route matches.
        access: the credential that the route requires.
        dialect: the API whose error format is used.
        endpoint: returns the ASGI application that answers a request: a response, files or a page.
        serves_tenants: whether tenants (owners of keys in `--api-keys-file`) may use the route even
            if it requires the admin key.
    """

    path: str | None
    access: Access
    dialect: Dialect
    endpoint: Endpoint
    serves_tenants: bool = False


_NO_METHODS: dict[str, RouteMatch] = {}


class RouteTable:
    """All routes of the server; only routes in this table can be called."""

    def __init__(self, root_path: str = "") -> None:
        """Match paths with and without `root_path`, the prefix that a proxy adds."""
        self._root_path = root_path.rstrip("/")
        self._exact: dict[str, dict[str, RouteMatch]] = {}
        self._patterns: list[tuple[BaseRoute, RouteMatch]] = []
        self._pages: dict[str, dict[str, RouteMatch]] = {}

    def add(
        self,
        route: BaseRoute,
        access: Access,
        dialect: Dialect = Dialect.NATIVE,
        *,
        serves_tenants: bool = False,
    ) -> RouteMatch:
        """Add a route. Of several routes with the same path and method, the first one is used.

        Args:
            route: the route to match and to run.
            access: the credential that it requires.
            dialect: the API whose error format is used. Native routes below `/v1/` use OpenAI's.
            serves_tenants: whether tenants (owners of keys in `--api-keys-file`) may use the route
                even if it requires the admin key.

        Raises:
            TypeError: a route of this kind, or with this declaration, is not supported.
        """
        path = getattr(route, "path", "")
        if not isinstance(route, Route | Mount) or not path.isprintable():
            raise TypeError(f"{route!r} is not an HTTP route with a plain path")
        methods = frozenset(getattr(route, "methods", None) or ())
        if access is Access.OPEN and not (methods and methods <= _READING):
            raise TypeError(f"{route!r} is open, so it may only answer GET and HEAD")
        if dialect is Dialect.NATIVE:
            dialect = Dialect.of_path(path)
        match = RouteMatch(path, access, dialect, _endpoint(route, dialect), serves_tenants)
        if isinstance(route, Mount) or route.param_convertors or not methods:
            self._patterns.append((route, match))
            return match
        by_method = self._exact.setdefault(path, {})
        for method in methods:
            by_method.setdefault(method, match)
        if _answers_head(match, methods):
            by_method.setdefault("HEAD", match)
        return match

    def show_page(self, path: str, page: str) -> None:
        """Let requests for `path` that prefer HTML run the route whose path is `page`."""
        self._pages[path] = self._exact[page]

    def resolve(self, scope: Scope) -> RouteMatch:
        """Return the route of a request, and store it in `scope["route"]`."""
        path: str = scope["path"]
        if self._root_path:
            scope["root_path"] = self._root_path
            if path.startswith(f"{self._root_path}/"):
                path = path[len(self._root_path) :]
        by_method = self._exact.get(path, _NO_METHODS)
        if path in self._pages and prefers_html(scope):
            by_method = by_method | self._pages[path]
        match = by_method.get(scope["method"])
        if match is None:
            near = dict(by_method)
            match = self._search(scope, path, near) or _unmatched(scope["method"], path, near)
        scope["route"] = match
        return match

    def _search(self, scope: Scope, path: str, near: dict[str, RouteMatch]) -> RouteMatch | None:
        # A path with a line break is refused, because `$` in a pattern also matches before one.
        if not path.isprintable():
            return None
        for route, match in self._patterns:
            found, child_scope = route.matches(scope)
            if found is Match.FULL:
                scope.update(child_scope)
                return match
            if found is Match.PARTIAL:
                methods = cast("Route", route).methods or ()
                if scope["method"] == "HEAD" and _answers_head(match, methods):
                    scope.update(child_scope)
                    return match
                near |= dict.fromkeys(methods, match)
        return None


def _answers_head(match: RouteMatch, methods: Collection[str]) -> bool:
    """Whether a HEAD request runs the GET handler; the HTTP server then drops the body."""
    # Admin routes are excluded, because some of them change the server on GET.
    return "GET" in methods and match.access is not Access.ADMIN


def _endpoint(route: Route | Mount, dialect: Dialect) -> Endpoint:
    if isinstance(route, APIRoute):
        return _plain_endpoint(route)
    # The route is one of FastAPI's own pages, or a folder of files.
    inner = route.handle

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await inner(scope, receive, send)
        except HTTPException as error:
            refusal = HttpRefusal(error.detail, error.status_code)
            await error_response(refusal, dialect)(scope, receive, send)

    async def answer(_: Request) -> ASGIApp:
        return page

    return answer


def _plain_endpoint(route: APIRoute) -> Endpoint:
    hints = get_type_hints(route.endpoint)
    returned = hints.pop("return", None)
    is_plain = inspect.isclass(returned) and issubclass(returned, Response)
    is_plain &= list(hints.values()) in ([], [Request])
    is_plain &= len(inspect.signature(route.endpoint).parameters) == len(hints)
    if not is_plain or route.dependencies or getattr(route, "max_body_size", None) is not None:
        raise TypeError(
            f"{route!r}: a handler takes the request or nothing and returns a response; other "
            "features of FastAPI, such as dependencies and limits, would be ignored"
        )
    if hints:
        return cast("Endpoint", route.endpoint)
    endpoint = cast("Callable[[], Awaitable[Response]]", route.endpoint)

    async def answer(_: Request) -> Response:
        return await endpoint()

    return answer


def _unmatched(method: str, path: str, near: Mapping[str, RouteMatch]) -> RouteMatch:
    """Return a match that refuses the request; `near` has the path's routes for other methods."""
    if method == "OPTIONS":
        # A browser's preflight request (OPTIONS) has no key.
        access = Access.OPEN
    elif any(match.access is Access.ADMIN for match in near.values()):
        access = Access.ADMIN
    else:
        access = Access.KEY
    dialect = next((match.dialect for match in near.values()), Dialect.of_path(path))
    methods = ", ".join(sorted(near))

    async def refuse(_: Request) -> Response:
        asked = f"{method} {path[:128]!a}"
        if methods:
            raise MethodNotAllowed(asked, methods)
        raise RouteNotFound(asked, instead_of(path))

    return RouteMatch(None, access, dialect, refuse)
