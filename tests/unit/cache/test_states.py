"""Recurrent states in the cache: recovery, where a prompt leaves the cache, states not trusted."""

from __future__ import annotations

import msgspec
import numpy as np

from runtime.cache.block_table import BlockTable
from runtime.cache.manager import CacheManager
from runtime.cache.radix_tree import Tokens
from runtime.ipc.messages import MatchPrefix, PrefixReport
from runtime.ipc.time_messages import PrefixBreak
from runtime.scheduler.stats import report_prefix

PAGE = 4
NUM_PAGES = 16


def tokens(*values: int) -> Tokens:
    return np.array(values, dtype=np.int32)


def manager(num_slots: int = 12) -> CacheManager:
    return CacheManager(NUM_PAGES, PAGE, num_state_slots=num_slots, max_running=4)


def begin(cache: CacheManager, prompt: Tokens) -> BlockTable:
    table = BlockTable()
    cache.attach_prefix(table, prompt, "")
    assert cache.extend(table, len(prompt))
    return table


def compute(cache: CacheManager, table: BlockTable, start: int, end: int, *points: int) -> None:
    assert cache.states is not None
    holds, starts, lens = (
        np.array([value], dtype=np.int64) for value in (table.state_hold, start, end - start)
    )
    cache.states.advance(holds, starts, lens, [(0, points)])


def cached(cache: CacheManager, prompt: Tokens) -> None:
    """Compute a prompt and leave its pages, with a snapshot at the end of the last one."""
    table = begin(cache, prompt)
    whole = len(prompt) - len(prompt) % PAGE
    compute(cache, table, table.num_shared * PAGE, len(prompt), whole)
    cache.release(table, prompt, "")


def test_pages_of_a_lost_request_can_be_evicted() -> None:
    cache = manager()
    prompt = tokens(*range(1, 10))
    cached(cache, prompt)
    # It reads the snapshot, and an exception loses it.
    begin(cache, prompt)
    # What is looked at while it is in use leaves the list of what may be evicted.
    assert not cache.extend(BlockTable(), NUM_PAGES * PAGE)
    assert not len(cache.tree.evict(1))
    cache.recover([])
    cache.check_invariants([])
    assert cache.extend(table := BlockTable(), NUM_PAGES * PAGE)
    assert table.num_pages == NUM_PAGES


def test_a_prompt_leaves_the_cache_behind_its_snapshot() -> None:
    cache = manager()
    first = tokens(*range(1, 14))
    cached(cache, first[:5])
    cached(cache, first)
    # Two edges are shared, the second of them only in part; the snapshot is between them.
    prompt = tokens(*first[:10], 90, 91, 92)
    table = begin(cache, prompt)
    assert table.num_shared == 1
    assert cache.prefix_break(table, prompt) == (PrefixBreak(10, differs=True), False)


def test_a_cut_prefix_does_not_hide_where_the_prompt_leaves_the_cache() -> None:
    cache = CacheManager(NUM_PAGES, PAGE)
    first = tokens(*range(1, 14))
    for prompt in (first[:9], first):
        table = begin(cache, prompt)
        cache.release(table, prompt, "")
    table = BlockTable()
    cache.attach_prefix(table, first[:5], "")
    prompt = tokens(*first[:11], 90, 91)
    assert cache.prefix_break(table, prompt) == (PrefixBreak(11, differs=True), False)


def test_the_report_counts_what_can_be_resumed() -> None:
    cache = manager()
    first = tokens(*range(1, 14))
    cached(cache, first)
    for end, num_cached in ((13, 12), (11, 0)):
        found = report_prefix(MatchPrefix(1, first[:end].tobytes(), ""), cache, "")
        report = msgspec.msgpack.decode(found.data, type=PrefixReport)
        assert (report.num_tokens, report.num_cached) == (min(end, 12), num_cached)


def test_states_that_are_not_trusted_leave_the_tree() -> None:
    cache = manager()
    assert cache.states is not None
    prompt = tokens(*range(1, 14))
    table = begin(cache, prompt)
    compute(cache, table, 0, 8, 8)
    cache.share(table, prompt[:8], "")
    other = begin(cache, tokens(*prompt[:8], 70))
    assert other.num_shared == 2
    cache.distrust(table, "")
    # Another request reads the snapshot: it stays until that one ends.
    assert cache.match_length(prompt, "") == 8
    cache.check_invariants([other])
    cache.distrust(other, "")
    assert cache.match_length(prompt, "") == 0
    assert cache.states.slots.num_free == cache.states.num_slots
    assert cache.pool.num_free == NUM_PAGES
    cache.check_invariants([])


def test_what_others_need_stays_when_a_path_is_not_trusted() -> None:
    cache = manager()
    prompt = tokens(*range(1, 14))
    cached(cache, tokens(*prompt[:4], 80, 81, 82, 83, 84))
    table = begin(cache, prompt)
    compute(cache, table, 0, 8, 8)
    cache.share(table, prompt[:8], "")
    cache.distrust(table, "")
    cache.check_invariants([])
    assert cache.match_length(prompt, "") == 0
    assert cache.match_length(tokens(*prompt[:4], 80, 81, 82, 83, 84), "") == 8
    assert cache.extend(BlockTable(), NUM_PAGES * PAGE)
