"""The tenant whose request is served. Tenants share no names and no cached prefixes.

A tenant is the owner of one key of `--api-keys-file`. All names in requests (sessions, `rid`s,
stored responses, files, batches) are looked up among the tenant's own objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

# The HTTP entry sets this for each request. It is empty for the server's operator and the offline
# engine.
TENANT: ContextVar[str] = ContextVar("tenant", default="")


def tenants_namespace(namespace: str) -> str:
    """Return the prefix-cache namespace for a tenant's request that names `namespace`."""
    tenant = TENANT.get()
    # Namespaces that requests name begin with a digit, or are empty.
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
    """Whether a store that all tenants share accepts `new` more units from the current tenant.

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
    """Return the tenant whose oldest object a full store forgets: the tenant with the most bytes.

    So a tenant can displace only its own objects, or those of a tenant with more bytes.

    Args:
        held: bytes of each tenant.
    """
    return max(held, key=held.__getitem__)
