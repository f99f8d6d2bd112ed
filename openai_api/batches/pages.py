"""Paged lists: the page that a query requests, and OpenAI's form of a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openai_api.query import number_in, word_in
from runtime.errors import InvalidRequest


@dataclass(frozen=True)
class Page:
    """The requested page.

    Attributes:
        after: id of the last item of the previous page.
        limit: most items.
        newest_first: the order.
    """

    after: str | None
    limit: int
    newest_first: bool

    @classmethod
    def asked(cls, query: Mapping[str, str], *, default: int, most: int) -> Page:
        """Parse the page that a query string requests.

        Raises:
            InvalidRequest: an invalid limit, or an unknown order.
        """
        limit = number_in(query, "limit", 1, most) or default
        newest_first = word_in(query, "order", ("asc", "desc")) != "asc"
        return cls(query.get("after") or None, limit, newest_first)

    def of(self, items: list[Any]) -> list[Any]:
        """Return the items of this page, and one more if there is one.

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
        """Build OpenAI's form of a page; `wire` has the wire objects of the items from `of`."""
        data = wire[: self.limit]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(wire) > self.limit,
        }
