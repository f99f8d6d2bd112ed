"""Lists the items of a stored response's conversation, in pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai_api.query import number_in, word_in
from openai_api.schemas.responses import kind_of
from runtime.errors import InvalidRequest

MAX_LIMIT = 100
_DEFAULT_LIMIT = 20


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of items that a query string asks for.

    The page has `limit` items after the item `after`, the newest first unless `order` is `asc`.

    Raises:
        InvalidRequest: the query is wrong.
    """
    found = list(listed(items))
    if word_in(query, "order", ("asc", "desc")) != "asc":
        found.reverse()
    limit = number_in(query, "limit", 1, MAX_LIMIT) or _DEFAULT_LIMIT
    after = query.get("after")
    begin = 0
    if after is not None:
        ids = [item["id"] for item in found]
        if after not in ids:
            raise InvalidRequest(f"after: there is no item {after[:64]!r} here.", param="after")
        begin = ids.index(after) + 1
    page = found[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(found),
    }


def listed(items: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the items with ids and types; an item without an id gets one from its index."""
    for index, item in enumerate(items):
        found = {"id": f"item_{index}", **item, "type": kind_of(item)}
        if found["type"] == "message":
            found.setdefault("status", "completed")
            if isinstance(found.get("content"), str):
                found["content"] = [_part(found["role"], found["content"])]
        yield found


def _part(role: str, text: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}
