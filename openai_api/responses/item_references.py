"""Items of stored responses, by their ids: clients send `item_reference` instead of a stored item.

The id of an item contains the digits of its response's id, so that the store needs no index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from openai_api.responses.response_store import StoredResponse
from openai_api.schemas.responses import ItemReference, check_num_items, kind_of, read_item
from runtime.errors import InvalidRequest
from runtime.eventloop.heavy_work import aside
from runtime.requests.random_hex import random_hex

_PREFIX = "resp_"
_NUM_DIGITS = 48


class UnknownItem(InvalidRequest):
    """The server stores no item with this id."""

    status_code = 404


def new_response_id() -> str:
    """Return the id of a new response."""
    return f"{_PREFIX}{random_hex(_NUM_DIGITS // 2)}"


def id_of_item(prefix: str, response_id: str, index: int) -> str:
    """Return the id of the item at `index` of a response's output, such as `msg_...`."""
    return f"{prefix}_{response_id.removeprefix(_PREFIX)}{index:04x}"


async def with_items(
    items: list[dict[str, Any]], stored: Callable[[str], Awaitable[StoredResponse | None]]
) -> list[dict[str, Any]]:
    """Replace each reference in `items` by the stored item.

    Args:
        items: the input of a request.
        stored: finds a response of the caller by its id.

    Raises:
        UnknownItem: no stored response has the item.
        InvalidRequest: a reference without an id, or too many references.
    """
    named = await aside(items, _references, items)
    check_num_items(len(named))
    found = list(items)
    # A response is decoded once, however many of its items are named.
    outputs: dict[str, dict[str, dict[str, Any]]] = {}
    for index, item_id in named.items():
        digits = item_id.partition("_")[2][:_NUM_DIGITS]
        if digits not in outputs:
            response = await stored(f"{_PREFIX}{digits}")
            output = [] if response is None else response.response["output"]
            outputs[digits] = {each["id"]: each for each in output}
            # Large responses take milliseconds to decode, and other requests come in between.
            await asyncio.sleep(0)
        if item_id not in outputs[digits]:
            raise UnknownItem(
                f"input[{index}]: item with id {item_id[:64]!r} not found. This server keeps the "
                "newest responses with store, for a day (--response-store-mb); send the item "
                "itself, or previous_response_id.",
                param=f"input[{index}]",
            )
        found[index] = outputs[digits][item_id]
    return found


def _references(items: list[dict[str, Any]]) -> dict[int, str]:
    """Return the indices of the references, with the ids that they name."""
    found = {}
    for index, item in enumerate(items):
        if kind_of(item) == "item_reference":
            reference = read_item(item, f"input[{index}]")
            assert isinstance(reference, ItemReference)
            found[index] = reference.id
    return found
