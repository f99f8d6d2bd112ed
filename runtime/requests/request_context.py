"""Ids and route of the HTTP request that is being served, which label its records and log lines."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Ids and route of one HTTP request.

    Attributes:
        request_id: its `X-Request-Id`.
        trace_id: 32 hexadecimal digits; empty if requests are not traced.
        span_id: 16 hexadecimal digits, the id of the request's own span.
        is_sampled: whether its spans are exported.
        route: path of its route, as registered.
    """

    request_id: str
    trace_id: str = ""
    span_id: str = ""
    is_sampled: bool = False
    route: str = ""


# The current request, set by the HTTP entry; `None` outside of HTTP requests.
REQUEST: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def request_labels(context: RequestContext | None) -> dict[str, str]:
    """Return a request's ids as labels of a log line; empty outside of HTTP requests."""
    if context is None:
        return {}
    if not context.trace_id:
        return {"request_id": context.request_id}
    return {
        "request_id": context.request_id,
        "trace_id": context.trace_id,
        "span_id": context.span_id,
    }
