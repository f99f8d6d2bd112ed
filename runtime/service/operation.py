"""The inputs and answers that a route declares at registration, for `server.openapi`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

OPERATION_KEY = "x-operation"
# Where the OpenAPI document has its schemas.
REFERENCE = "#/components/schemas/{name}"

# For each media type, the types that may be sent in it. Without a media type the body is empty.
Content = Mapping[str, tuple[Any, ...]]
EMPTY: Content = {}
JSON, FORM = "application/json", "multipart/form-data"


def json_of(*kinds: Any) -> Content:
    """JSON of one of `kinds`."""
    return {JSON: kinds}


def text() -> Content:
    """Plain text."""
    return {"text/plain": (str,)}


def events_of(*kinds: Any) -> Content:
    """Describe server-sent events, whose data is JSON of one of `kinds`.

    If the events have no names, a last event has the data `[DONE]`.
    """
    return {"text/event-stream": kinds}


def lines_of(*kinds: Any) -> Content:
    """Describe lines, each of which is JSON of one of `kinds`."""
    return {"application/x-ndjson": kinds}


def described_as(*kinds: type[msgspec.Struct]) -> msgspec.Meta:
    """Describe a field that is decoded as an object, and is checked later as one of `kinds`.

    The operation lists them in `mentions`.
    """
    references = [{"$ref": REFERENCE.format(name=kind.__name__)} for kind in kinds]
    one = references[0] if len(references) == 1 else {"anyOf": references}
    return msgspec.Meta(extra_json_schema=one)


@dataclass(frozen=True)
class Query:
    """A parameter in the query string.

    Attributes:
        kind: the parameter's type, which may have bounds.
    """

    name: str
    kind: Any
    description: str
    required: bool = False


@dataclass(frozen=True)
class Operation:
    """One route; see `operation`."""

    body: type[msgspec.Struct] | None
    media: str
    body_may_be_absent: bool
    answers: Mapping[int, Content]
    query: Sequence[Query]
    mentions: Sequence[type]
    refuses: Sequence[int]


def operation(
    body: type[msgspec.Struct] | None = None,
    *,
    media: str = JSON,
    ok: Content | None = EMPTY,
    others: Mapping[int, Content] | None = None,
    refuses: Sequence[int] = (),
    query: Sequence[Query] = (),
    mentions: Sequence[type] = (),
    body_may_be_absent: bool = False,
) -> dict[str, Any]:
    """Return a route's `openapi_extra`.

    Args:
        body: the struct that decodes the request's JSON, or that describes its form.
        media: the body's media type.
        ok: the content with status 200; None if the route never answers 200.
        others: the content with other statuses, besides the usual error body.
        refuses: statuses of errors, except those implied by the access level, a body or an
            internal error.
        query: parameters in the query string.
        mentions: types that describe parts of the body; see `described_as`.
        body_may_be_absent: whether a missing body means `{}`.
    """
    answers = {**({} if ok is None else {200: ok}), **(others or {})}
    return {
        OPERATION_KEY: Operation(body, media, body_may_be_absent, answers, query, mentions, refuses)
    }
