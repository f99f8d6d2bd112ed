"""Pages are never lost or doubled, in any order of requests that come, share, grow and go."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cache.block_table import BlockTable
from runtime.cache.manager import CacheManager


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_second_request_reuses_the_pages_of_the_first() -> None:
    manager = CacheManager(8, 2)
    first = BlockTable()
    prompt = tokens(1, 2, 3, 4, 5)
    assert manager.attach_prefix(first, prompt, "") == 0
    assert manager.extend(first, 5)
    pages = first.held().copy()
    manager.release(first, prompt, "")
    second = BlockTable()
    assert manager.attach_prefix(second, prompt, "") == 4
    assert second.held().tolist() == pages[:2].tolist()
    manager.check_invariants([second])


@pytest.mark.parametrize("fault", ["lost", "doubled", "both", 0, -1, 9])
def test_lost_and_doubled_pages_are_noticed(fault: str | int) -> None:
    manager = CacheManager(8, 2)
    block_table = BlockTable()
    assert manager.extend(block_table, 16)
    manager.check_invariants([block_table])
    pages = block_table.held()
    if fault == "lost":
        block_table.num_pages -= 1
    elif fault == "doubled":
        block_table.append(pages[:1].copy())
    else:
        pages[-1] = pages[1] if isinstance(fault, str) else fault
    with pytest.raises(AssertionError, match="lost or doubled"):
        manager.check_invariants([block_table])


def test_a_whole_cached_prompt_leaves_one_token_to_compute() -> None:
    manager = CacheManager(8, 2)
    first = BlockTable()
    prompt = tokens(1, 2, 3, 4)
    manager.attach_prefix(first, prompt, "")
    manager.extend(first, 4)
    manager.release(first, prompt, "")
    second = BlockTable()
    assert manager.attach_prefix(second, prompt, "") == 2


def test_name_spaces_share_nothing() -> None:
    manager = CacheManager(8, 2)
    first = BlockTable()
    prompt = tokens(1, 2, 3, 4, 5)
    manager.attach_prefix(first, prompt, "a")
    manager.extend(first, 5)
    manager.release(first, prompt, "a")
    assert manager.match_length(prompt, "b") == 0
    assert manager.match_length(prompt, "a") == 4


def test_concurrent_duplicates_are_given_back_and_swapped() -> None:
    manager = CacheManager(8, 2)
    prompt = tokens(1, 2, 3, 4, 5)
    one, two = BlockTable(), BlockTable()
    for block_table in (one, two):
        manager.attach_prefix(block_table, prompt, "")
        assert manager.extend(block_table, 5)
    manager.share(one, prompt, "")
    manager.share(two, prompt, "")
    assert one.held()[:2].tolist() == two.held()[:2].tolist()
    manager.check_invariants([one, two])


def test_eviction_takes_the_least_recently_used_and_only_as_much_as_needed() -> None:
    manager = CacheManager(6, 2)
    for start in (10, 20):
        block_table = BlockTable()
        prompt = np.arange(start, start + 6, dtype=np.int32)
        manager.attach_prefix(block_table, prompt, "")
        manager.extend(block_table, 6)
        manager.release(block_table, prompt, "")
    block_table = BlockTable()
    assert manager.extend(block_table, 2)
    assert manager.match_length(np.arange(20, 26, dtype=np.int32), "") == 6
    assert manager.match_length(np.arange(10, 16, dtype=np.int32), "") == 4
    manager.check_invariants([block_table])


def test_locked_prefixes_are_not_evicted() -> None:
    manager = CacheManager(3, 2)
    block_table = BlockTable()
    prompt = tokens(1, 2, 3, 4, 5)
    manager.attach_prefix(block_table, prompt, "")
    assert manager.extend(block_table, 5)
    manager.share(block_table, prompt, "")
    assert not manager.extend(BlockTable(), 2)
    manager.release(block_table, prompt, "")
    assert manager.extend(BlockTable(), 6)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "grow", "share", "finish", "drop", "flush"]),
            st.integers(0, 7),
            st.integers(0, 40),
        ),
        max_size=60,
    )
)
def test_invariants_hold_over_random_histories(history: list[tuple[str, int, int]]) -> None:
    page_size = 4
    manager = CacheManager(24, page_size)
    block_tables: dict[int, tuple[BlockTable, np.ndarray, int]] = {}
    for action, key, number in history:
        if action == "start" and key not in block_tables:
            sequence = (np.arange(60, dtype=np.int32) // (1 + number % 3)) + (number % 2)
            block_table = BlockTable()
            manager.attach_prefix(block_table, sequence[: 4 + number], "")
            block_tables[key] = (block_table, sequence, block_table.num_pages * page_size)
        elif action == "grow" and key in block_tables:
            block_table, sequence, length = block_tables[key]
            target = min(length + number, len(sequence))
            if manager.extend(block_table, target):
                block_tables[key] = (block_table, sequence, target)
        elif action == "share" and key in block_tables:
            block_table, sequence, length = block_tables[key]
            manager.share(block_table, sequence[:length], "")
        elif action in ("finish", "drop") and key in block_tables:
            block_table, sequence, length = block_tables.pop(key)
            manager.release(block_table, sequence[: length if action == "finish" else 0], "")
        elif action == "flush":
            manager.flush()
        manager.check_invariants([entry[0] for entry in block_tables.values()])
    for block_table, _, _ in block_tables.values():
        manager.release(block_table, np.empty(0, dtype=np.int32), "")
    manager.flush()
    assert manager.pool.num_free == 24


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_pages_behind_a_window_are_free_for_others(enable_prefix_cache: bool) -> None:
    manager = CacheManager(8, 2, enable_prefix_cache=enable_prefix_cache, window=4)
    block_table, prompt = BlockTable(), tokens(*range(6))
    manager.attach_prefix(block_table, prompt, "")
    assert manager.extend(block_table, 12)
    manager.share(block_table, prompt, "")
    # The tree's part is let go as a whole: not before its last token lies behind.
    first = manager.drop_behind(block_table, 5)
    assert block_table.num_dropped == (0 if enable_prefix_cache else 2)
    assert first == 3
    manager.check_invariants([block_table])
    assert manager.drop_behind(block_table, 9) == 5
    assert block_table.held()[:4].tolist() == [0] * 4
    assert (block_table.held()[4:] > 0).all()
    assert manager.num_available_pages == 6
    manager.check_invariants([block_table])
    # What was shared before it was let go is still found.
    other = BlockTable()
    assert manager.attach_prefix(other, tokens(*range(7)), "") == 6 * enable_prefix_cache
    manager.release(block_table, tokens(*range(12)), "")
    manager.release(other, prompt[:0], "")
    manager.check_invariants([])
    assert manager.num_available_pages == 8


def test_a_tree_that_is_evicted_beneath_a_window_harms_nobody() -> None:
    manager = CacheManager(8, 2, window=4)
    block_table, prompt = BlockTable(), tokens(*range(8))
    manager.attach_prefix(block_table, prompt, "")
    assert manager.extend(block_table, 12)
    manager.share(block_table, prompt, "")
    manager.drop_behind(block_table, 8)
    other = BlockTable()
    assert manager.extend(other, 12)
    assert manager.tree.num_pages == 0
    manager.check_invariants([block_table, other])
    assert manager.extend(block_table, 12)
    manager.release(block_table, tokens(*range(12)), "")
    manager.release(other, tokens(), "")
    manager.check_invariants([])
