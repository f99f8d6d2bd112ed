"""A route's declaration of its inputs and answers, from which `server.openapi` describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

OPERATION_KEY = "x-operation"
# Path of a schema in the OpenAPI document.
REFERENCE = "#/components/schemas/{name}"

# Maps each media type to the types of its bodies. An empty mapping means an empty body.
Content = Mapping[str, tuple[Any, ...]]
EMPTY: Content = {}
JSON, FORM = "application/json", "multipart/form-data"


def json_of(*kinds: Any) -> Content:
    """Describe a body that is JSON of one of the types `kinds`."""
    return {JSON: kinds}


def text() -> Content:
    """Describe a body of plain text."""
    return {"text/plain": (str,)}


def events_of(*kinds: Any) -> Content:
    """Describe server-sent events, whose data is JSON of one of the types `kinds`.

    If the events have no names, the stream ends with an event whose data is `[DONE]`.
    """
    return {"text/event-stream": kinds}


def lines_of(*kinds: Any) -> Content:
    """Describe lines, each of which is JSON of one of the types `kinds`."""
    return {"application/x-ndjson": kinds}


def described_as(*kinds: type[msgspec.Struct]) -> msgspec.Meta:
    """Describe a field that is decoded as a plain object and checked later as one of `kinds`.

    The route's `operation` must list the same types in `mentions`.
    """
    references = [{"$ref": REFERENCE.format(name=kind.__name__)} for kind in kinds]
    one = references[0] if len(references) == 1 else {"anyOf": references}
    return msgspec.Meta(extra_json_schema=one)


@dataclass(frozen=True)
class Query:
    """A parameter in the query string.

    Attributes:
        name: the parameter's name.
        kind: its type, which may have bounds.
        description: one sentence for the API's documentation.
        required: whether a request must have it.
    """

    name: str
    kind: Any
    description: str
    required: bool = False


@dataclass(frozen=True)
class Operation:
    """The declared inputs and answers of one route; the fields are the arguments of `operation`."""

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
    """Return the `openapi_extra` of a route, which declares its inputs and answers.

    Args:
        body: the struct that decodes the request's JSON, or that describes its form.
        media: the body's media type.
        ok: the content of an answer with status 200; None if the route never answers 200.
        others: the content of answers with other statuses, besides the usual error body.
        refuses: statuses of errors that this route adds. Those that follow from the route's access
            level, from having a body, or from an internal error are always described.
        query: parameters in the query string.
        mentions: types that describe parts of the body; see `described_as`.
        body_may_be_absent: whether an absent body means `{}`.
    """
    answers = {**({} if ok is None else {200: ok}), **(others or {})}
    return {
        OPERATION_KEY: Operation(body, media, body_may_be_absent, answers, query, mentions, refuses)
    }
