"""JSON encoded in pieces equals JSON encoded at once, and each piece is small."""

import asyncio
import time

import orjson
import pytest

from runtime.eventloop.json_pieces import (
    INLINE_COST,
    GrowingJson,
    JsonItems,
    JsonList,
    all_pieces,
    encode,
)
from runtime.eventloop.time_slices import SLICE_S, Slices, in_turns

# What an encoder must not mistake for a place that is left open.
TEXT = "a \0 null, \x01 and \\u0000"


def joined(content):
    data = encode(content)
    return orjson.loads(data if isinstance(data, bytes) else b"".join(data))


@pytest.mark.parametrize("count", [0, 1, 5, 2000])
@pytest.mark.parametrize("batch", [1, 3])
def test_lists(count, batch):
    items = [[n, TEXT, None] for n in range(count)]
    content = {"x": TEXT, "a": JsonList(count, iter(items), batch=batch), "b": [JsonList(0, [])]}
    assert joined(content) == {"x": TEXT, "a": items, "b": [[]]}


def test_small_ones_are_encoded_at_once():
    assert isinstance(encode({"a": JsonList(INLINE_COST, range(INLINE_COST))}), bytes)
    assert not isinstance(encode({"a": JsonList(INLINE_COST + 1, range(INLINE_COST + 1))}), bytes)


def test_lists_in_items():
    items = [{"a": JsonList(3, range(3)), "t": TEXT}, 7, {"b": JsonItems([], 0)}]
    assert joined({"i": JsonItems(items, 1000)}) == {
        "i": [{"a": [0, 1, 2], "t": TEXT}, 7, {"b": []}]
    }


@pytest.mark.parametrize("keeps", [False, True])
def test_a_list_that_grows(keeps):
    made = GrowingJson(keeps=keeps)
    assert joined(made) == []
    made.extend(1, [1])
    made.extend(2, iter([2, 3]), batch=2)
    assert made.cost == 3
    assert joined({"a": made}) == {"a": [1, 2, 3]}
    made.extend(1, [4])
    assert joined(made) == ([1, 2, 3, 4] if keeps else [4])
    assert joined(made) == ([1, 2, 3, 4] if keeps else [])


def test_what_has_no_json_is_an_error():
    with pytest.raises(TypeError):
        encode({"a": object()})


async def test_others_are_served_between_slices():
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def write():
        content = {"a": JsonList(10**6, ([n] * 500 for n in range(2000)))}
        return b"".join([part async for part in in_turns(all_pieces(content))])

    other = asyncio.create_task(count())
    first, second = await asyncio.gather(write(), write())
    other.cancel()
    assert first == second
    assert len(orjson.loads(first)["a"]) == 2000
    # Each is some sixteen slices by its bytes alone.
    assert turns > 20


@pytest.mark.parametrize("is_long", [False, True])
async def test_slices_take_turns(is_long):
    order = []

    async def work(name):
        async with Slices(is_long=is_long) as slices:
            for _ in range(3):
                until = time.monotonic() + SLICE_S
                while time.monotonic() < until:
                    pass
                order.append(name)
                await slices.step()

    await asyncio.gather(work("a"), work("b"))
    # The first had its second turn coming before the other one asked for any.
    assert "".join(order) == ("aababb" if is_long else "aaabbb")


async def test_a_slice_that_fails_or_is_left_lets_the_next_one_in():
    with pytest.raises(ZeroDivisionError):
        async with Slices():
            raise ZeroDivisionError
    async with Slices():
        waiting = asyncio.create_task(Slices().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
    async with asyncio.timeout(60), Slices():
        pass
