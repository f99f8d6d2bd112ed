"""The prefix cache's tier in host memory: pages come back with the right tokens, however late."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.cache.file_tier import FileTier
from runtime.cache.host_tier import HostTier, root_key
from runtime.cache.page_files import PageFiles
from runtime.ipc.messages import AbortRequests, FlushCache
from runtime.ipc.weight_messages import InvalidateCache, PauseGeneration
from tests.support.scheduler_harness import PAGE, Harness, expected
from tests.support.waiting import until

NUM_PAGES = 40


def harness(
    folder: Path,
    num_host_pages: int,
    *,
    is_late: bool = False,
    num_slots: int = 0,
    num_host_slots: int = 20,
    **options: Any,
) -> Harness:
    sizes = {"num_host_pages": num_host_pages}
    if num_slots:
        sizes |= {"num_state_slots": num_slots, "num_host_slots": num_host_slots, "max_running": 8}
    made = Harness(folder, num_pages=NUM_PAGES, token_budget=16, states=sizes, **options)
    runner = made.runner
    runner.host = np.full((num_host_pages + 1) * PAGE, -1, dtype=np.int32)
    if is_late:
        runner.is_late = True
        made.cache.host.last_done = lambda: runner.page_copies.last_done
        if num_slots:
            states = made.cache.tiers.states.slots
            states.last_done = lambda: runner.state_copies.last_done
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
    run_at_random(engine, seed)
    if num_host_pages > 9:
        assert engine.cache.host.num_loaded > 50


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_host_pages", "num_slots"), [(9, 24), (200, 24), (200, 60)])
def test_no_state_ever_has_seen_other_tokens(
    tmp_path: Path, num_host_pages: int, num_slots: int, overlap: bool
) -> None:
    is_late = num_slots == 60
    engine = harness(
        tmp_path, num_host_pages, is_late=is_late, num_slots=num_slots, overlap=overlap
    )
    run_at_random(engine, num_slots)
    if num_host_pages > 9:
        assert engine.cache.host.num_loaded > 50
        assert engine.cache.tiers.states.slots.num_loaded > 20


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_host_pages", [9, 60])
def test_no_file_ever_has_other_tokens(tmp_path: Path, num_host_pages: int, overlap: bool) -> None:
    engine = harness(tmp_path, num_host_pages, is_late=True, overlap=overlap)
    tier = with_files(engine, tmp_path / "pages")
    # New weights would end the use of files.
    run_at_random(engine, 4, has_new_weights=False)
    settle(engine, tier)
    assert tier.num_read > 20
    assert tier.num_written > 50


def run_at_random(engine: Harness, seed: int, *, has_new_weights: bool = True) -> None:
    """Compute many requests, disturb them in many ways, and check all tokens."""
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
        elif chance < (0.1 if has_new_weights else 0.08):
            engine.scheduler.receive([InvalidateCache(step)])
        elif chance < 0.12:
            engine.scheduler.receive([FlushCache(step)])
        elif chance < 0.13:
            engine.scheduler.receive([PauseGeneration(step, retract=True)])
        elif chance < 0.15:
            runner.wait_error = RuntimeError("planted")
        engine.scheduler.step()
        runner.wait_error = None
        if step % 10 == 9 and engine.cache.host.files is not None:
            # Threads on a busy machine may be slower than all the steps.
            settle(engine, engine.cache.host.files)
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


@pytest.mark.parametrize("num_slots", [6, 24])
def test_conversations_of_hybrids_come_back(tmp_path: Path, num_slots: int) -> None:
    """Pages and snapshots are evicted apart; a conversation finds both."""
    engine = harness(tmp_path, 200, num_slots=num_slots, num_host_slots=80)
    histories = dict(enumerate(texts(6, 90)))
    number = 0
    for turn in range(3):
        for name, history in histories.items():
            number += 1
            engine.add(number, history, 5, ignore_eos=True)
            engine.run()
            engine.scheduler.check_invariants()
            assert engine.tokens[number] == expected(history, 5)
            if turn:
                assert engine.cached[number] == (len(history) - 4) // PAGE * PAGE
                known = np.array(history[:-1], dtype=np.int32)
                assert engine.cache.count_found(known, "") == (len(history) - 1) // PAGE * PAGE
            histories[name] = history + engine.tokens[number] + [7, 8, 9]
    branch = [*histories[0][:95], 1, 2, 3]
    # A branch finds the snapshot of an earlier turn.
    engine.add(99, branch, 2, ignore_eos=True)
    engine.run()
    assert engine.tokens[99] == expected(branch, 2)
    assert engine.cached[99] >= 88
    engine.scheduler.receive([InvalidateCache(1)])
    assert engine.cache.count_found(known, "") == 0
    engine.scheduler.check_invariants()


def test_what_may_be_wrong_is_forgotten_in_host_memory_too(tmp_path: Path) -> None:
    engine = harness(tmp_path, 200, num_slots=4)
    states = engine.cache.tiers.states.slots
    (prompt,) = texts(1, 90)
    engine.add(1, prompt, 5, ignore_eos=True)
    for _ in range(5):
        engine.scheduler.step()
    # The snapshots of the first chunks had to make room.
    assert states.num_held > 0
    engine.runner.fail_rows_with_token = prompt[-1]
    engine.run()
    assert engine.reasons[1].status_code == 500
    assert states.num_held == 0
    engine.scheduler.check_invariants()


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


class SlowFiles(PageFiles):
    """Files on a disk that answers when `disk` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, b"i" * 32, 10**8)
        self.disk = threading.Event()

    def read(self, key: bytes, page: memoryview) -> bool:
        return self.disk.wait() and super().read(key, page)


def with_files(engine: Harness, folder: Path, files: PageFiles | None = None) -> FileTier:
    """Let pages of a harness that arrive in host memory go to files."""
    rows = engine.runner.host.reshape(-1, PAGE)
    files = files or PageFiles(folder, b"i" * 32, 10**8)
    engine.cache.host.files = tier = FileTier(files, lambda page: memoryview(rows[page]).cast("B"))
    return tier


def settle(engine: Harness, tier: FileTier) -> None:
    """Wait until no page is on its way from or to a file."""

    def is_still() -> bool:
        engine.scheduler.rest()
        return not tier.busy

    until(is_still)
    engine.scheduler.check_invariants()


def test_conversations_go_on_after_a_restart(tmp_path: Path) -> None:
    prompts = texts(6, 96)
    engine = harness(tmp_path, 200)
    tier = with_files(engine, tmp_path / "pages")
    for number, prompt in enumerate(prompts):
        engine.add(number, prompt, 1, ignore_eos=True)
        engine.run()
    settle(engine, tier)
    assert tier.num_written > 5 * 20
    again = harness(tmp_path, 200)
    tier = with_files(again, tmp_path / "pages")
    for number, prompt in enumerate(prompts):
        again.add(number, prompt, 9, ignore_eos=True)
        again.run()
        assert again.tokens[number] == expected(prompt, 9)
        again.scheduler.check_invariants()
    # All but the last conversations were evicted, and so written.
    assert [again.cached[number] for number in range(3)] == [92] * 3
    assert tier.num_read > 3 * 20


def test_only_lasting_namespaces_have_files(tmp_path: Path) -> None:
    for turn in range(2):
        engine = harness(tmp_path, 200)
        tier = with_files(engine, tmp_path / "pages")
        engine.scheduler.receive([InvalidateCache(1)] if turn == 0 else [])
        for number, prompt in enumerate(texts(6, 96)):
            engine.add(number, prompt, 1, ignore_eos=True)
            engine.run()
        settle(engine, tier)
        # After the weights changed, nothing is written; so the next server reads nothing.
        assert tier.num_read == 0
        assert (tier.num_written > 0) == (turn == 1)
    tier.is_on = False
    keys = list(engine.cache.host.keys(np.array(texts(1, 96)[0], np.int32), root_key("lora 1:")))
    assert not engine.cache.host.fetch(keys)
    assert {key[-1] for key in keys} == {0}


def test_streams_do_not_wait_for_files(tmp_path: Path) -> None:
    stream, first, *others = texts(6, 96)
    engine = harness(tmp_path, 200)
    tier = with_files(engine, tmp_path / "pages")
    for number, prompt in enumerate([first, *others]):
        engine.add(number, prompt, 1, ignore_eos=True)
        engine.run()
    settle(engine, tier)
    again = harness(tmp_path, 200)
    files = SlowFiles(tmp_path / "pages")
    tier = with_files(again, tmp_path, files)
    again.add(1, stream[:8], 60, ignore_eos=True)
    again.scheduler.step()
    again.add(2, first, 1, ignore_eos=True)
    again.add(3, stream[8:30], 2, ignore_eos=True)
    before = len(again.tokens[1])
    for _ in range(10):
        again.scheduler.step()
    assert len(again.tokens[1]) == before + 10
    assert 2 not in again.reasons
    # A request that has no files does not wait either.
    assert again.tokens[3] == expected(stream[8:30], 2)
    files.disk.set()
    settle(again, tier)
    again.run()
    assert again.tokens[2] == expected(first, 1)
    assert again.cached[2] == 92


def test_damaged_files_are_computed_again(tmp_path: Path) -> None:
    prompts = texts(6, 96)
    engine = harness(tmp_path, 200)
    tier = with_files(engine, tmp_path / "pages")
    for number, prompt in enumerate(prompts):
        engine.add(number, prompt, 1, ignore_eos=True)
        engine.run()
    settle(engine, tier)
    for index, path in enumerate(sorted((tmp_path / "pages").glob("*/*.kv"))):
        if index % 3 == 0:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = harness(tmp_path, 200)
    tier = with_files(again, tmp_path / "pages")
    for number, prompt in enumerate(prompts):
        again.add(number, prompt, 9, ignore_eos=True)
        again.run()
        assert again.tokens[number] == expected(prompt, 9)
        again.scheduler.check_invariants()
    assert tier.num_read > 20
