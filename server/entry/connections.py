"""Refuses requests on connections over the limit, except probes."""

from __future__ import annotations

from starlette.types import Scope

from runtime.errors import Overloaded
from server.access import Access


def check_connection(scope: Scope) -> None:
    """Refuse a request on a connection over the limit, unless the request is a probe.

    Raises:
        Overloaded: the request is refused.
    """
    route = scope["route"]
    is_probe = route.access is Access.OPEN and route.path is not None
    if scope["state"].get("is_spare_connection") and not is_probe:
        raise Overloaded("Too many connections are open (--max-connections).")
