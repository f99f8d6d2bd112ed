"""Heavy work: what counts as light, where it runs, and how a request's objects are freed."""

import asyncio
import threading
import weakref
from typing import Any

import msgspec
import pytest

from runtime.eventloop.heavy_work import aside, free_politely, is_light, take_apart
from tests.support.waiting import until_in_loop


class Leaf(msgspec.Struct):
    name: str
    parts: str | list[Any] | None = None


@pytest.mark.parametrize(
    ("value", "light"),
    [
        ({"a": [1, 2, {"b": None}]}, True),
        (Leaf("a", [Leaf("b")] * 20), True),
        ("x" * 100_000, True),
        ([0] * 1000, False),
        ([[[0] * 30] * 30], False),
        ({str(at): at for at in range(1000)}, False),
        (Leaf("a", [Leaf("b", [Leaf("c")] * 20)] * 50), False),
        (["x" * 1_000_000] * 10, False),
    ],
)
async def test_what_is_not_light_runs_on_a_thread(value: Any, light: bool) -> None:
    assert is_light(value) is light
    here = threading.get_ident()
    assert (await aside(value, threading.get_ident) == here) is light


async def test_a_value_is_freed_once_nobody_uses_it() -> None:
    class Watched(list[int]):
        pass

    value: Any = [Watched([1]), [0] * 10]
    watched = weakref.ref(value[0])
    free_politely(value, after_s=0.01)
    # Until then it is whole, however often it was looked at.
    looked = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, looked.set)
    await looked.wait()
    assert len(value) == 2
    del value
    await until_in_loop(lambda: watched() is None)


def test_what_is_freed_stays_whole_for_others() -> None:
    kept = [{"a": [1, 2]}, Leaf("b", [Leaf("c")])]
    shared = {"text": ["x"] * 3}
    value = Leaf("top", [*kept, shared, [kept], {"in": shared}, *range(5000)])
    inner = value.parts
    held = [value]
    del value
    take_apart(held)
    assert not held
    assert isinstance(inner, list)
    # A list that somebody refers to keeps its items.
    assert len(inner) == 5005
    held = [inner]
    del inner
    take_apart(held)
    assert kept == [{"a": [1, 2]}, Leaf("b", [Leaf("c")])]
    assert shared == {"text": ["x"] * 3}
