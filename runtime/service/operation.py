"""What a route takes and answers, said where it is registered; `server.openapi` writes it down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

OPERATION_KEY = "x-operation"
# Where the document keeps schemas.
REFERENCE = "#/components/schemas/{name}"

# Media type to the types of what may be sent in it; without one the body is empty.
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
    """Server-sent events; each one's data is JSON of one of `kinds`.

    Where they have no names, one more says `[DONE]`.
    """
    return {"text/event-stream": kinds}


def lines_of(*kinds: Any) -> Content:
    """Lines, each JSON of one of `kinds`."""
    return {"application/x-ndjson": kinds}


def described_as(*kinds: type[msgspec.Struct]) -> msgspec.Meta:
    """What is decoded as an object and checked later as one of `kinds`.

    The operation mentions them.
    """
    references = [{"$ref": REFERENCE.format(name=kind.__name__)} for kind in kinds]
    one = references[0] if len(references) == 1 else {"anyOf": references}
    return msgspec.Meta(extra_json_schema=one)


@dataclass(frozen=True)
class Query:
    """A parameter in the query string.

    Attributes:
        kind: its type, which may have bounds.
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
    """What goes into a route's `openapi_extra`.

    Args:
        body: the struct that decodes the request's JSON, or that says what is in its form.
        media: what the body is.
        ok: what comes with status 200; None where that never comes.
        others: what comes with another status, beside an error's usual body.
        refuses: statuses of errors; those that the access level, a body or a failure of ours bring
            along need no mention.
        query: parameters.
        mentions: what parts of the body are described as; see `described_as`.
        body_may_be_absent: whether no body is as good as `{}`.
    """
    answers = {**({} if ok is None else {200: ok}), **(others or {})}
    return {
        OPERATION_KEY: Operation(body, media, body_may_be_absent, answers, query, mentions, refuses)
    }
