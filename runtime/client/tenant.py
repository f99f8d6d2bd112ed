"""Whose request is served: tenants share no cached prefix, whatever their requests say."""

from __future__ import annotations

from contextvars import ContextVar

# Set by the entry for each HTTP request; the server's operator and the offline engine have none.
TENANT: ContextVar[str] = ContextVar("tenant", default="")


def tenants_namespace(namespace: str) -> str:
    """The name space of the prefix cache in which a request for `namespace` runs."""
    tenant = TENANT.get()
    # Those that requests name begin with a digit, or are empty.
    return f"tenant {tenant}:{namespace}" if tenant else namespace
