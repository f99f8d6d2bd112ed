"""Declares routes: their access levels, and what the OpenAPI document says about them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

from starlette.routing import Route

from server.dialect import Dialect


class Access(Enum):
    """The credential that a route requires.

    Attributes:
        OPEN: none. It is for probes and scrapers; such a route answers only GET and HEAD.
        KEY: the API key, if one is set.
        ADMIN: the admin key if one is set, else the API key. It is for routes that change the
            server or other clients' requests.
    """

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class DeclaredRoute(Route):
    """A route with its part of the OpenAPI document.

    Attributes:
        tags: the groups of the document that have it.
        summary: a few words; empty for the first line of the description.
        description: the handler's docstring.
        openapi_extra: the result of `operation`, which declares inputs and answers.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        methods: Sequence[str] = ("GET",),
        name: str | None = None,
        tags: Sequence[str] = (),
        summary: str = "",
        include_in_schema: bool = True,
        openapi_extra: dict[str, Any] | None = None,
    ) -> None:
        """Declare a route; the attributes above and Starlette's `Route` describe the arguments."""
        super().__init__(
            path, endpoint, methods=list(methods), name=name, include_in_schema=include_in_schema
        )
        # Starlette adds HEAD to routes that answer GET. `RouteTable` decides which of them do.
        self.methods = {method.upper() for method in methods}
        self.tags = list(tags)
        self.summary = summary
        self.description = inspect.cleandoc(endpoint.__doc__ or "")
        self.openapi_extra = openapi_extra


class AccessRouter:
    """A list of routes that all have one access level.

    Attributes:
        routes: the routes in the order of their declarations.
        access, dialect, serves_tenants: see `__init__`.
    """

    def __init__(
        self,
        access: Access,
        *,
        tags: Sequence[str] = (),
        include_in_schema: bool = True,
        dialect: Dialect = Dialect.NATIVE,
        serves_tenants: bool = False,
    ) -> None:
        """Create a router without routes.

        Args:
            access: the credential that its routes require.
            tags: groups of its routes in the OpenAPI document.
            include_in_schema: whether its routes are in that document.
            dialect: the API whose error format is used. Routes of a native router below `/v1/` use
                OpenAI's.
            serves_tenants: whether keys of `--api-keys-file` may call its routes even if these
                require the admin key. The handlers then restrict them to the tenant's own requests.
        """
        self.routes: list[DeclaredRoute] = []
        self._tags = tuple(tags)
        self._include_in_schema = include_in_schema
        self.access = access
        self.dialect = dialect
        self.serves_tenants = serves_tenants

    def add(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        methods: Sequence[str] = ("GET",),
        name: str | None = None,
        tags: Sequence[str] = (),
        summary: str = "",
        openapi_extra: dict[str, Any] | None = None,
    ) -> None:
        """Declare a route; see `DeclaredRoute`. `tags` are added to the router's."""
        self.routes.append(
            DeclaredRoute(
                path,
                endpoint,
                methods=methods,
                name=name,
                tags=(*self._tags, *tags),
                summary=summary,
                include_in_schema=self._include_in_schema,
                openapi_extra=openapi_extra,
            )
        )

    def get(self, path: str, **options: Any) -> Callable[[_Handler], _Handler]:
        """Return a decorator that declares a handler's route for GET, with options of `add`."""
        return self._decorator(path, "GET", options)

    def post(self, path: str, **options: Any) -> Callable[[_Handler], _Handler]:
        """Return a decorator that declares a handler's route for POST, with options of `add`."""
        return self._decorator(path, "POST", options)

    def _decorator(
        self, path: str, method: str, options: dict[str, Any]
    ) -> Callable[[_Handler], _Handler]:
        def declare(handler: _Handler) -> _Handler:
            self.add(path, handler, methods=(method,), **options)
            return handler

        return declare
