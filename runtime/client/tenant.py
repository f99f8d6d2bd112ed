"""The current tenant: the owner of the request that is being served.

A tenant is the owner of one key of `--api-keys-file`. Tenants share no cached prefixes and no
names: sessions, `rid`s, stored responses, files and batches are looked up among the tenant's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

# The current tenant's name, set for each HTTP request. It is empty for the server's operator and
# for the offline engine.
TENANT: ContextVar[str] = ContextVar("tenant", default="")


def tenants_namespace(namespace: str) -> str:
    """Return the prefix-cache namespace of the current tenant's requests with `namespace`."""
    tenant = TENANT.get()
    # The result differs from every namespace without a tenant: those begin with a digit or are
    # empty.
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

    After the addition, at least as much room as the tenant uses must remain free. So a tenant
    cannot lock the others out. The operator's own requests may fill the store.

    Args:
        new: number of units to add; a unit is a byte or a token.
        own: number of units that the tenant uses already.
        everyone: number of units that all tenants use together.
        most: number of units that the store may hold.
    """
    left = most - everyone - new
    return left >= (own + new if TENANT.get() else 0)


def next_to_yield(held: Mapping[str, int]) -> str:
    """Return the tenant whose oldest object a full store removes: the one with the most bytes.

    So a tenant can remove only its own objects, or those of a tenant that uses more.

    Args:
        held: number of bytes that each tenant uses.
    """
    return max(held, key=held.__getitem__)
