"""Who may call a route: every router says so where its routes are registered."""

from __future__ import annotations

from enum import Enum

from fastapi import APIRouter

from server.dialect import Dialect


class Access(Enum):
    """What a client must show.

    Attributes:
        OPEN: nothing. For probes and scrapers; such a route answers GET and HEAD alone.
        KEY: the API key, where one is set.
        ADMIN: the admin key, where one is set, else the API key. For routes that change the server
            or other clients' requests.
    """

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


class AccessRouter(APIRouter):
    """Routes of one level of access, which is not optional: the server takes no other routers."""

    def __init__(
        self,
        access: Access,
        *,
        tags: list[str | Enum] | None = None,
        include_in_schema: bool = True,
        dialect: Dialect = Dialect.NATIVE,
        serves_tenants: bool = False,
    ) -> None:
        """Make an empty router.

        Args:
            access: who may call its routes.
            tags: in the OpenAPI document.
            include_in_schema: whether its routes are in that document.
            dialect: of errors; a native router's paths under `/v1/` speak OpenAI's.
            serves_tenants: keys of `--api-keys-file` may call admin routes too; the handlers let
                them act on their own requests only.
        """
        super().__init__(tags=tags, include_in_schema=include_in_schema)
        self.access = access
        self.dialect = dialect
        self.serves_tenants = serves_tenants
