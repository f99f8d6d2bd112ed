"""Bearer keys: whether a request may have the route that was found for it."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import Scope

from server.access import Access
from server.error_responses import KeyRefused

# Where keys are sent: the second one is Anthropic's clients' own.
KEY_HEADERS = frozenset({"authorization", "x-api-key"})


class Keys:
    """The keys of this server, as digests: comparing them takes the same time for any input."""

    def __init__(self, api_key: str | None, admin_api_key: str | None) -> None:
        """Without `admin_api_key` the API key opens admin routes too."""
        self._api_digest = _digest(api_key.encode()) if api_key else None
        self._admin_digest = _digest(admin_api_key.encode()) if admin_api_key else None

    @property
    def exist(self) -> bool:
        """Whether there is one."""
        return self._api_digest is not None or self._admin_digest is not None

    def has_valid(self, scope: Scope) -> bool:
        """Whether the request brings one of them, whatever it opens."""
        digest = _digest(_sent_key(scope))
        known = (self._api_digest, self._admin_digest)
        return any(each is not None and hmac.compare_digest(digest, each) for each in known)

    def refusal(self, scope: Scope) -> KeyRefused | None:
        """Why the request may not have its route; None when it may."""
        access = scope["route"].access
        if access is Access.OPEN:
            return None
        required = self._api_digest
        if access is Access.ADMIN and self._admin_digest is not None:
            required = self._admin_digest
        if required is None:
            return None
        digest = _digest(_sent_key(scope))
        if hmac.compare_digest(digest, required):
            return None
        known = self._api_digest is not None and hmac.compare_digest(digest, self._api_digest)
        return KeyRefused(is_known=known)


def _sent_key(scope: Scope) -> bytes:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if not values:
        # Anthropic's clients send their key in a header of their own.
        values = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(values) != 1:
        return b""
    scheme, _, key = values[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
