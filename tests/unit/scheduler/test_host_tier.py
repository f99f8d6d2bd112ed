"""The prefix cache's tier in host memory: pages come back with the right tokens, however late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.cache.host_tier import HostTier, root_key
from runtime.ipc.messages import AbortRequests, FlushCache
from runtime.ipc.weight_messages import InvalidateCache, PauseGeneration
from tests.support.scheduler_harness import PAGE, Harness, expected

NUM_PAGES = 40


def harness(folder: Path, num_host_pages: int, *, is_late: bool = False, **options: Any) -> Harness:
    states = {"num_host_pages": num_host_pages}
    made = Harness(folder, num_pages=NUM_PAGES, token_budget=16, states=states, **options)
    runner = made.runner
    runner.host = np.full((num_host_pages + 1) * PAGE, -1, dtype=np.int32)
    if is_late:
        runner.is_late = True
        made.cache.host.last_done = lambda: runner.last_done
    return made


def texts(count: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(1, 900, length).tolist() for _ in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_host_pages", [9, 60, 400])
@pytest.mark.parametrize("seed", range(4))
def test_no_page_ever_has_other_tokens(
    tmp_path: Path, seed: int, num_host_pages: int, overlap: bool
) -> None:
    """Also with failures, aborts, retractions, flushes, other adapters and weights."""
    engine = harness(tmp_path, num_host_pages, is_late=seed > 0, overlap=overlap)
    runner, rng = engine.runner, np.random.default_rng(seed)
    prompts: dict[int, tuple[list[int], int]] = {}
    ended: set[int] = set()
    prefixes = texts(8, 90)
    for step in range(260):
        if len(prompts) < 140 and rng.random() < 0.5:
            text = prefixes[rng.integers(8)]
            prompt = text[: rng.integers(1, 80)] + rng.integers(1, 900, rng.integers(12)).tolist()
            number = len(prompts) + 1
            prompts[number] = prompt, int(rng.integers(1, 40))
            namespace = "" if rng.random() < 0.8 else "other"
            engine.add(number, prompt, prompts[number][1], ignore_eos=True, namespace=namespace)
        chance = rng.random()
        if chance < 0.08 and prompts:
            number = int(rng.integers(len(prompts))) + 1
            if number not in engine.reasons:
                ended.add(number)
                engine.scheduler.receive([AbortRequests([number])])
        elif chance < 0.1:
            engine.scheduler.receive([InvalidateCache(step)])
        elif chance < 0.12:
            engine.scheduler.receive([FlushCache(step)])
        elif chance < 0.13:
            engine.scheduler.receive([PauseGeneration(step, retract=True)])
        elif chance < 0.15:
            runner.wait_error = RuntimeError("planted")
        engine.scheduler.step()
        runner.wait_error = None
        # Copies go on at any time.
        runner.make_copies(int(rng.integers(3)))
        engine.scheduler.check_invariants()
    engine.run()
    for number, (prompt, count) in prompts.items():
        assert number in engine.reasons
        if engine.reasons[number].type == "length":
            assert engine.tokens[number] == expected(prompt, count)
        else:
            assert number in ended or engine.reasons[number].status_code == 500
    assert engine.scheduler.can_compute
    if num_host_pages > 9:
        assert engine.cache.host.num_loaded > 50


def test_conversations_that_do_not_fit_come_back(tmp_path: Path) -> None:
    engine = harness(tmp_path, 200)
    # 24 pages and more each: the pool has room for one conversation.
    histories = dict(enumerate(texts(6, 96)))
    number = 0
    for turn in range(3):
        for name, history in histories.items():
            number += 1
            engine.add(number, history, 5, ignore_eos=True)
            engine.run()
            assert engine.tokens[number] == expected(history, 5)
            if turn:
                # All but the last token of the turn before, in whole pages.
                assert engine.cached[number] == (len(history) - 4) // PAGE * PAGE
            histories[name] = history + engine.tokens[number] + [7, 8, 9]
    assert engine.cache.host.num_loaded > 12 * 20


def test_what_was_not_used_for_longest_makes_room_from_the_end() -> None:
    tier = HostTier(3, PAGE)
    keys = {name: list(tier.keys(np.arange(2 * PAGE), root_key(name))) for name in "abcd"}
    tier.save(keys["a"], np.array([5, 6], dtype=np.int32))
    tier.save(keys["b"][:1], np.array([7], dtype=np.int32))
    tier.touch(keys["a"])
    for name, page in (("c", 8), ("d", 9)):
        tier.save(keys[name][:1], np.array([page], dtype=np.int32))
        tier.check_invariants()
    assert [len(tier.find(of_one)) for of_one in keys.values()] == [1, 0, 1, 1]
    # What is there already is not copied again.
    tier.save(keys["a"][:1], np.array([4], dtype=np.int32))
    copies = tier.take_copies()
    assert copies is not None
    assert copies.pages.tolist() == [6, 5, 7, 8, 9]
    # The page that two copies write gets the later one.
    (run,), beside = copies.split()
    assert not beside
    assert sorted(run.pages.tolist()) == [5, 8, 9]
    assert tier.take_copies() is None


def test_streams_do_not_wait_for_pages_that_come_back(tmp_path: Path) -> None:
    engine = harness(tmp_path, 200, is_late=True)
    stream, first, second = texts(3, 96)
    for number, text in ((1, first), (2, second)):
        engine.add(number, text, 1, ignore_eos=True)
        engine.run()
    engine.add(3, stream[:8], 60, ignore_eos=True)
    for _ in range(3):
        engine.scheduler.step()
    engine.add(4, first, 1, ignore_eos=True)
    before = len(engine.tokens[3])
    for _ in range(10):
        engine.scheduler.step()
    # The pages of the fourth request have not arrived, and the stream goes on.
    assert len(engine.tokens[3]) == before + 10
    assert 4 not in engine.reasons
    engine.runner.make_copies(99)
    engine.scheduler.step()
    assert engine.tokens[4] == expected(first, 1)
    assert engine.cached[4] == 92
    # A step without streams waits.
    engine.scheduler.receive([AbortRequests([3])])
    engine.add(5, second, 1, ignore_eos=True)
    engine.run(limit=6)
    assert engine.tokens[5] == expected(second, 1)
    assert engine.cached[5] == 92


def test_what_moved_to_host_memory_is_reported_as_cached(tmp_path: Path) -> None:
    engine = harness(tmp_path, 200)
    first, second = texts(2, 96)
    for number, text in ((1, first), (2, second)):
        engine.add(number, text, 1, ignore_eos=True)
        engine.run()
    assert engine.cache.match_length(np.array(first, dtype=np.int32), "") < 92
    assert engine.cache.count_found(np.array(first[:-1], dtype=np.int32), "") == 92
    engine.scheduler.receive([InvalidateCache(1)])
    assert engine.cache.count_found(np.array(first[:-1], dtype=np.int32), "") == 0
    assert engine.cache.host.num_held == 0
