"""Pages of lists: the page that a query string asks for, and OpenAI's format of a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openai_api.query import number_in, word_in
from runtime.errors import InvalidRequest


@dataclass(frozen=True)
class Page:
    """Which page of a list a query string asks for.

    Attributes:
        after: id of the last item of the previous page; None for the first page.
        limit: most items of the page.
        newest_first: whether the newest item comes first.
    """

    after: str | None
    limit: int
    newest_first: bool

    @classmethod
    def asked(cls, query: Mapping[str, str], *, default: int, most: int) -> Page:
        """Parse a query string.

        Args:
            query: the query string's parameters.
            default: number of items if the query has no `limit`.
            most: the greatest allowed `limit`.

        Raises:
            InvalidRequest: `limit` is out of bounds, or `order` is unknown.
        """
        limit = number_in(query, "limit", 1, most) or default
        newest_first = word_in(query, "order", ("asc", "desc")) != "asc"
        return cls(query.get("after") or None, limit, newest_first)

    def of(self, items: list[Any]) -> list[Any]:
        """Return the items of this page, and one further item if the list goes on.

        Args:
            items: all items, the oldest first, each with an `id`.

        Raises:
            InvalidRequest: `after` is not the id of an item.
        """
        ordered = items[::-1] if self.newest_first else items
        begin = 0
        if self.after is not None:
            places = [at for at, item in enumerate(ordered) if item.id == self.after]
            if not places:
                raise InvalidRequest("after is not the id of an item in this list.", param="after")
            begin = places[0] + 1
        return ordered[begin : begin + self.limit + 1]

    def answer(self, wire: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the page in OpenAI's format; `wire` has the items from `of` as JSON objects."""
        data = wire[: self.limit]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(wire) > self.limit,
        }
