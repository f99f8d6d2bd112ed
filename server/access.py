"""Which credential a route needs; every router declares it when its routes are registered."""

from __future__ import annotations

from enum import Enum

from fastapi import APIRouter

from server.dialect import Dialect


class Access(Enum):
    """The credential that a client must present.

    Attributes:
        OPEN: no credential. For probes and scrapers; such a route answers only GET and HEAD.
        KEY: the API key, if one is set.
        ADMIN: the admin key if one is set, else the API key. For routes that change the server
            or other clients' requests.
    """

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


class AccessRouter(APIRouter):
    """Routes of one access level. The server refuses a router that does not set one."""

    def __init__(
        self,
        access: Access,
        *,
        tags: list[str | Enum] | None = None,
        include_in_schema: bool = True,
        dialect: Dialect = Dialect.NATIVE,
        serves_tenants: bool = False,
    ) -> None:
        """Create an empty router.

        Args:
            access: the credential that its routes need.
            tags: used in the OpenAPI document.
            include_in_schema: whether its routes are in that document.
            dialect: the API whose error format is used. Paths of a native router under `/v1/` use
                OpenAI's.
            serves_tenants: keys of `--api-keys-file` may call admin routes too; the handlers let
                them act on their own requests only.
        """
        super().__init__(tags=tags, include_in_schema=include_in_schema)
        self.access = access
        self.dialect = dialect
        self.serves_tenants = serves_tenants
