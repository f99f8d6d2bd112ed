"""Checks the keys of requests: whether a request may use its route."""

from __future__ import annotations

import hmac

from starlette.types import Scope

from runtime.config.options import HttpArgs
from server.access import Access
from server.entry.tenants import digest_of, read_tenants
from server.error_responses import KeyRefused
from server.routing import RouteMatch

# The headers that carry keys. Anthropic's clients use the second one.
KEY_HEADERS = frozenset({"authorization", "x-api-key"})


class Keys:
    """The server's keys, kept as digests. So the duration of a comparison reveals no key."""

    def __init__(self, http: HttpArgs) -> None:
        """Read the keys. Without `admin_api_key`, the API key also opens admin routes.

        Raises:
            StartupError: `--api-keys-file` cannot be used; the message says why.
        """
        self._api_digest = digest_of(http.api_key.encode()) if http.api_key else None
        self._admin_digest = digest_of(http.admin_api_key.encode()) if http.admin_api_key else None
        self._tenants = read_tenants(http)

    @property
    def exist(self) -> bool:
        """Whether any key is set."""
        return self._api_digest is not None or self._admin_digest is not None

    def has_valid(self, scope: Scope) -> bool:
        """Whether the request has a valid key, for whichever route."""
        digest = digest_of(_sent_key(scope))
        known = (self._api_digest, self._admin_digest)
        return digest in self._tenants or any(
            each is not None and hmac.compare_digest(digest, each) for each in known
        )

    def tenant(self, scope: Scope) -> str:
        """Return the name of the tenant whose key a request has.

        Empty if it is not a tenant's key.
        """
        return self._tenants.get(digest_of(_sent_key(scope)), "") if self._tenants else ""

    def refusal(self, scope: Scope) -> KeyRefused | None:
        """Return why the request's key does not open its route; None if it does."""
        route: RouteMatch = scope["route"]
        access = route.access
        if access is Access.OPEN:
            return None
        required = self._api_digest
        if access is Access.ADMIN and self._admin_digest is not None:
            required = self._admin_digest
        if required is None:
            return None
        digest = digest_of(_sent_key(scope))
        if hmac.compare_digest(digest, required):
            return None
        is_tenant = digest in self._tenants
        if is_tenant and (access is Access.KEY or route.serves_tenants):
            return None
        known = self._api_digest is not None and hmac.compare_digest(digest, self._api_digest)
        known |= is_tenant
        return KeyRefused(is_known=known)


def _sent_key(scope: Scope) -> bytes:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if not values:
        # Anthropic's clients send the key in another header, without `Bearer`.
        values = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(values) != 1:
        return b""
    scheme, _, key = values[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
