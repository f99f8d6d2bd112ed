"""Finds stored items by id: a client may send an `item_reference` instead of an item itself.

An item's id contains the digits of its response's id, so no index of items is needed.
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
    """The server has stored no item with this id for this caller."""

    status_code = 404


def new_response_id() -> str:
    """Return the id of a new response."""
    return f"{_PREFIX}{random_hex(_NUM_DIGITS // 2)}"


def id_of_item(prefix: str, response_id: str, index: int) -> str:
    """Return the id, such as `msg_...`, of the item at `index` of a response's output."""
    return f"{prefix}_{response_id.removeprefix(_PREFIX)}{index:04x}"


async def with_items(
    items: list[dict[str, Any]], stored: Callable[[str], Awaitable[StoredResponse | None]]
) -> list[dict[str, Any]]:
    """Return `items` with each reference replaced by the stored item.

    Args:
        items: the input of a request.
        stored: returns the caller's stored response with an id, or None.

    Raises:
        UnknownItem: no stored response has the item.
        InvalidRequest: a reference has no id, or there are too many references.
    """
    named = await aside(items, _references, items)
    check_num_items(len(named))
    found = list(items)
    # Decoded outputs of responses, so that each response is decoded once.
    outputs: dict[str, dict[str, dict[str, Any]]] = {}
    for index, item_id in named.items():
        digits = item_id.partition("_")[2][:_NUM_DIGITS]
        if digits not in outputs:
            response = await stored(f"{_PREFIX}{digits}")
            output = [] if response is None else response.response["output"]
            outputs[digits] = {each["id"]: each for each in output}
            # Decoding a large response takes milliseconds, so other requests get a turn here.
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
    """Return the index of each reference in `items`, with the id that it names."""
    found = {}
    for index, item in enumerate(items):
        if kind_of(item) == "item_reference":
            reference = read_item(item, f"input[{index}]")
            assert isinstance(reference, ItemReference)
            found[index] = reference.id
    return found
