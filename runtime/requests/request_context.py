"""The HTTP request that is being served: what its records and log lines are labelled with."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One HTTP request.

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


# The HTTP entry sets this for each request. It is `None` outside of them.
REQUEST: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def request_labels(context: RequestContext | None) -> dict[str, str]:
    """Return the ids for a log line; empty outside of requests."""
    if context is None:
        return {}
    if not context.trace_id:
        return {"request_id": context.request_id}
    return {
        "request_id": context.request_id,
        "trace_id": context.trace_id,
        "span_id": context.span_id,
    }
