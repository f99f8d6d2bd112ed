"""Whose request is served: tenants share no name and no cached prefix.

A tenant is the owner of one key of `--api-keys-file`. Each name that a request can choose or learn
(sessions, `rid`s, stored responses, files, batches) is looked up in the tenant's own space.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

# Set by the HTTP entry for each request; empty for the server's operator and the offline engine.
TENANT: ContextVar[str] = ContextVar("tenant", default="")


def tenants_namespace(namespace: str) -> str:
    """The prefix-cache namespace in which a request for `namespace` runs."""
    tenant = TENANT.get()
    # Namespaces named by requests begin with a digit, or are empty.
    return f"tenant {tenant}:{namespace}" if tenant else namespace


@contextmanager
def acting_for(tenant: str) -> Iterator[None]:
    """Run the block as if `tenant` had sent the request."""
    token = TENANT.set(tenant)
    try:
        yield
    finally:
        TENANT.reset(token)


def fits_beside_others(new: int, *, own: int, everyone: int, most: int) -> bool:
    """Whether a store that all tenants share takes `new` units more from the current tenant.

    A tenant must leave at least as much room free as it takes, so that it cannot lock the others
    out. The operator's own requests may fill the store.

    Args:
        new: units to add; bytes or tokens.
        own: units that the tenant holds already.
        everyone: units that all tenants hold together.
        most: units that the store may hold.
    """
    left = most - everyone - new
    return left >= (own + new if TENANT.get() else 0)


def next_to_yield(held: Mapping[str, int]) -> str:
    """The tenant that makes room where a store forgets its oldest: the one that holds most.

    A tenant can thus only push out its own things, or those of one that holds more.

    Args:
        held: bytes of each tenant.
    """
    return max(held, key=held.__getitem__)
