"""The cache of grammars: bounded, and the same on both sides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.grammar.cache import ByteCache


def test_the_longest_unused_goes() -> None:
    cache: ByteCache[int] = ByteCache(10)
    for key in (b"a", b"b", b"c"):
        cache.put(key, key[0], 4)
    assert cache.get(b"a") is None
    assert cache.get(b"b") == ord("b")
    cache.put(b"d", 1, 4)
    assert cache.get(b"c") is None
    assert cache.get(b"b") is not None
    assert cache.size_bytes == 8
    cache.put(b"e", 1, 100)
    assert len(cache) == 1
    assert cache.get(b"e") == 1
    cache.clear()
    assert (len(cache), cache.size_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), max_size=200))
def test_a_twin_that_is_fed_alike_holds_the_same(uses: list[tuple[int, int]]) -> None:
    front: ByteCache[bool] = ByteCache(100)
    scheduler: ByteCache[bytes] = ByteCache(100)
    for number, size in uses:
        key = bytes([number])
        if front.get(key) is None:
            front.put(key, True, size)
            scheduler.put(key, key, size)
        assert scheduler.get(key) == key
        assert front.size_bytes == scheduler.size_bytes
        assert len(front) == 1 or front.size_bytes <= 100
