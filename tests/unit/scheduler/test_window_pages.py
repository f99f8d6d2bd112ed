"""Windowed layers with pages of their own: nothing is lost, and every window has its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.cache.block_table import BlockTable
from runtime.cache.manager import CacheManager
from runtime.cache.window_pages import WindowPages, pages_of_request
from runtime.ipc.messages import AbortRequests
from tests.support.scheduler_harness import PAGE, Harness, expected

NUM_PAGES = 40
CHUNK = 16


class WatchedCache(CacheManager):
    """Knows the block tables that the scheduler last let it check."""

    block_tables: list[BlockTable]

    def check_invariants(self, block_tables: list[BlockTable]) -> None:
        super().check_invariants(block_tables)
        self.block_tables = block_tables


def harness(folder: Path, window: int, num_requests: int, **options: Any) -> Harness:
    """Have window pages for so many requests at a time."""
    made = Harness(folder, num_pages=NUM_PAGES, token_budget=CHUNK, cache=WatchedCache, **options)
    made.runner.window = window
    made.cache.windows = WindowPages(
        num_requests * pages_of_request(window, PAGE) + CHUNK // PAGE,
        NUM_PAGES,
        page_size=PAGE,
        window=window,
        step_tokens=CHUNK,
    )
    return made


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("window", [5, 12])
@pytest.mark.parametrize("seed", range(3))
def test_no_window_ever_lacks_a_token(
    tmp_path: Path, seed: int, window: int, overlap: bool
) -> None:
    prefix_cache = seed > 0
    engine = harness(tmp_path, window, 1 + seed, prefix_cache=prefix_cache, overlap=overlap)
    rng = np.random.default_rng(seed)
    prompts: dict[int, tuple[list[int], int]] = {}
    aborted: set[int] = set()
    texts = [rng.integers(1, 900, 90).tolist() for _ in range(3)]
    for _ in range(110):
        if len(prompts) < 60 and rng.random() < 0.4:
            text = texts[rng.integers(3)]
            prompt = text[: rng.integers(1, 80)] + rng.integers(1, 900, rng.integers(12)).tolist()
            number = len(prompts) + 1
            prompts[number] = prompt, int(rng.integers(1, 30))
            engine.add(number, prompt, prompts[number][1], ignore_eos=True)
        if rng.random() < 0.05 and prompts:
            number = int(rng.integers(len(prompts))) + 1
            if number not in engine.reasons:
                aborted.add(number)
                engine.scheduler.receive([AbortRequests([number])])
        if rng.random() < 0.03:
            # As after an exception: what belongs to running requests stays.
            engine.scheduler.check_invariants()
            engine.cache.recover(engine.cache.block_tables)
        engine.scheduler.step()
        engine.scheduler.check_invariants()
    engine.run()
    for number, (prompt, count) in prompts.items():
        if number not in aborted:
            assert engine.tokens[number] == expected(prompt, count)
    if prefix_cache:
        assert sum(engine.cached.values()) > 0
    engine.cache.flush()
    assert engine.cache.windows is not None
    assert engine.cache.windows.pool.num_free == engine.cache.windows.pool.num_pages


def test_a_turn_computes_its_new_tokens_only(tmp_path: Path) -> None:
    engine = harness(tmp_path, 12, 2)
    history = list(range(1, 60))
    for turn in range(1, 4):
        engine.add(turn, history, 9, ignore_eos=True)
        engine.run()
        if turn > 1:
            # All but the last token of the turn before, in whole pages.
            assert engine.cached[turn] == (len(history) - 6) // PAGE * PAGE
        history = history + engine.tokens[turn] + [7, 8, 9, 10, 11]
    # The same prompt again, which ends where the window of a prompt was kept.
    engine.add(9, list(range(1, 60)), 2, ignore_eos=True)
    engine.run()
    assert engine.cached[9] == 56


def test_a_prefix_without_its_window_is_computed_again_and_then_found(tmp_path: Path) -> None:
    engine = harness(tmp_path, 12, 1)
    common = list(range(1, 41))
    for number, length in ((1, 60), (2, 64)):
        engine.add(number, common + list(range(100 * number, 100 * number + length)), 1)
        engine.run()
    # The window before the branch was behind the first prompt's, and its pages are used again.
    engine.add(3, [*common, 901, 902, 903], 1)
    engine.run()
    engine.add(4, [*common, 905, 906, 907], 1)
    engine.run()
    assert engine.cached[4] == 40
