"""The access levels of routes: which credential a client must present."""

from __future__ import annotations

from enum import Enum

from fastapi import APIRouter

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


class AccessRouter(APIRouter):
    """A router whose routes all have one access level."""

    def __init__(
        self,
        access: Access,
        *,
        tags: list[str | Enum] | None = None,
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
            serves_tenants: whether tenants (owners of keys in `--api-keys-file`) may call its
                routes even if these require the admin key. The handlers then restrict a tenant to
                its own requests.
        """
        super().__init__(tags=tags, include_in_schema=include_in_schema)
        self.access = access
        self.dialect = dialect
        self.serves_tenants = serves_tenants
