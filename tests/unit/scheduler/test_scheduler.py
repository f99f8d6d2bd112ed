"""The scheduler's guarantees, checked with a runner that detects any wrong page."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cache.manager import CacheManager, Tokens
from runtime.errors import DeviceLost
from runtime.ipc.messages import (
    AbortAll,
    AbortRequests,
    ControlReply,
    FinishReason,
    FlushCache,
    StopHit,
)
from runtime.ipc.weight_messages import ContinueGeneration, PauseGeneration
from runtime.scheduler.budget import TokenBudget, smooth_tokens
from tests.support.scheduler_harness import Harness, expected

# One step after another, two in flight, and the stages of a model, each with another step.
WAYS: list[dict[str, Any]] = [{}, {"overlap": True}, {"num_stages": 2}, {"num_stages": 3}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_a_lost_page_is_noticed_once_nothing_runs(folder: Path) -> None:
    harness = Harness(folder)
    harness.scheduler.check_when_idle()
    harness.add(1, [1, 2, 3], 8)
    harness.scheduler.step()
    lost = harness.cache.pool.take(1)
    harness.scheduler.check_when_idle()
    with pytest.raises(AssertionError, match="lost or doubled"):
        harness.run()
    harness.cache.pool.give_back(lost)
    harness.scheduler.check_when_idle()
    harness.cache.pool.take(1)
    # Nothing has run since, so it does not check again.
    harness.scheduler.check_when_idle()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [None, 3, 16])
def test_output_does_not_depend_on_batching(
    folder: Path, way: dict[str, Any], budget: int | None
) -> None:
    harness = Harness(folder, **way, token_budget=budget)
    prompts = {i: list(range(i, i + 3 * i + 1)) for i in range(1, 14)}
    for i, prompt in prompts.items():
        harness.add(i, prompt, 3 + i)
    harness.run()
    for i, prompt in prompts.items():
        assert harness.tokens[i] == expected(prompt, 3 + i)
        assert harness.reasons[i] == FinishReason("length", length=3 + i)
    assert harness.shared["num_running_reqs"] == harness.shared["num_used_tokens"] == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", ["launch_error", "wait_error"])
def test_a_lost_device_is_not_caught(folder: Path, overlap: bool, place: str) -> None:
    harness = Harness(folder, overlap=overlap)
    harness.add(1, [1, 2, 3], 20)
    harness.scheduler.step()
    setattr(harness.runner, place, DeviceLost("planted"))
    with pytest.raises(DeviceLost, match="planted"):
        _steps(harness, 2)
    assert not harness.reasons, "it is the front that ends the requests of a worker that has ended"


def _steps(harness: Harness, count: int) -> None:
    for _ in range(count):
        harness.scheduler.step()


def test_a_device_lost_in_a_step_that_a_pause_waits_for(folder: Path) -> None:
    harness = Harness(folder, overlap=True)
    harness.add(1, [1, 2, 3], 20)
    harness.runner.wait_error = DeviceLost("planted")
    harness.scheduler.step()
    with pytest.raises(DeviceLost):
        harness.scheduler.receive([PauseGeneration(1, retract=False)])


@pytest.mark.parametrize("way", WAYS)
def test_retraction_does_not_change_outputs(folder: Path, way: dict[str, Any]) -> None:
    harness = Harness(folder, **way, num_pages=14)
    for i in range(1, 7):
        harness.add(i, [i, i + 1, i + 2], 40)
    harness.run()
    assert harness.shared["num_retractions_total"] > 0
    for i in range(1, 7):
        assert harness.tokens[i] == expected([i, i + 1, i + 2], 40)


@pytest.mark.parametrize("way", WAYS)
def test_end_of_sequence_stops_at_once(folder: Path, way: dict[str, Any]) -> None:
    harness = Harness(folder, **way)
    harness.runner.eos_at = {7: 9}
    harness.add(1, [7, 1, 2], 50)
    harness.add(2, [8, 1, 2], 12)
    harness.run()
    assert harness.tokens[1][-1] == 0
    assert len(harness.tokens[1]) == 7
    assert harness.reasons[1] == FinishReason("stop", matched=0)
    assert harness.tokens[2] == expected([8, 1, 2], 12)


def test_ignore_eos_and_own_stop_ids(folder: Path) -> None:
    harness = Harness(folder)
    harness.runner.eos_at = {7: 5}
    harness.add(1, [7, 1, 2], 10, ignore_eos=True)
    third = expected([9, 9], 3)[2]
    harness.add(2, [9, 9], 10, stop_token_ids=[third])
    harness.run()
    assert len(harness.tokens[1]) == 10
    assert harness.reasons[2] == FinishReason("stop", matched=third)
    assert len(harness.tokens[2]) == 3


def test_second_request_finds_the_prefix(folder: Path) -> None:
    harness = Harness(folder)
    prompt = list(range(1, 23))
    harness.add(1, prompt, 4)
    harness.run()
    harness.add(2, prompt, 4)
    harness.add(3, prompt, 4, namespace="other")
    harness.run()
    assert harness.cached == {1: 0, 2: 20, 3: 0}
    assert harness.tokens[2] == harness.tokens[1] == harness.tokens[3]


def test_simultaneous_requests_share_a_long_prefix(folder: Path) -> None:
    harness = Harness(folder, num_pages=400, context_len=400, token_budget=256)
    prefix = list(range(1, 201))
    for i in range(1, 5):
        harness.add(i, [*prefix, 500 + i], 3)
    harness.run()
    assert [harness.cached[i] for i in range(1, 5)] == [0, 200, 200, 200]
    for i in range(1, 5):
        assert harness.tokens[i] == expected([*prefix, 500 + i], 3)


def test_no_new_tokens_means_compute_the_prompt_only(folder: Path) -> None:
    harness = Harness(folder)
    harness.add(1, list(range(1, 40)), 0)
    harness.run()
    assert harness.tokens[1] == []
    assert harness.reasons[1] == FinishReason("length", length=0)
    harness.add(2, list(range(1, 40)), 1)
    harness.run()
    assert harness.cached[2] == 36


def test_aborts_of_running_and_waiting_requests(folder: Path) -> None:
    harness = Harness(folder, rows=1)
    harness.add(1, [1, 2, 3], 50)
    harness.add(2, [4, 5, 6], 50)
    for _ in range(5):
        harness.scheduler.step()
    harness.scheduler.receive([AbortRequests([1, 2, 99])])
    harness.run()
    assert harness.reasons[1] == FinishReason("abort", message="Aborted")
    assert harness.reasons[2] == FinishReason("abort", message="Abort in waiting queue")
    assert harness.tokens[1] == expected([1, 2, 3], len(harness.tokens[1]))


def test_a_stop_hit_ends_without_a_report(folder: Path) -> None:
    harness = Harness(folder)
    harness.add(1, [1, 2, 3], 50)
    harness.scheduler.step()
    harness.scheduler.receive([StopHit([1])])
    harness.run()
    assert 1 not in harness.reasons
    assert harness.shared["num_used_tokens"] == 0


def test_a_full_queue_refuses(folder: Path) -> None:
    harness = Harness(folder, rows=1, max_queued=1)
    for i in range(1, 5):
        harness.add(i, [i], 5)
        harness.scheduler.step()
    harness.run()
    refused = [i for i, reason in harness.reasons.items() if reason.status_code == 503]
    assert refused == [3, 4]


def test_a_request_that_never_fits_is_refused(folder: Path) -> None:
    harness = Harness(folder, num_pages=4)
    harness.add(1, list(range(1, 10)), 8)
    harness.add(2, [1, 2], 5)
    harness.run()
    assert harness.reasons[1].status_code == 400
    assert harness.tokens[2] == expected([1, 2], 5)


def test_only_the_faulty_request_fails(folder: Path) -> None:
    harness = Harness(folder)
    harness.runner.fail_rows_with_token = 666
    harness.add(1, [1, 2, 3], 8)
    harness.add(2, [5, 666, 7], 8)
    harness.run()
    assert harness.reasons[2].status_code == 500
    assert harness.tokens[1] == expected([1, 2, 3], 8)


def test_states_of_a_failed_request_are_not_reused(folder: Path) -> None:
    harness = Harness(folder, states={"num_state_slots": 12, "max_running": 8})
    harness.runner.fail_rows_with_token = 666
    prompt = list(range(1, 40))
    # Its first chunks are shared before the last one fails.
    harness.add(1, [*prompt, 666], 8)
    harness.run()
    assert harness.reasons[1].status_code == 500
    states = harness.cache.states
    assert states is not None
    assert states.slots.num_free == states.num_slots
    harness.add(2, [*prompt, 5], 8)
    harness.run()
    assert harness.cached[2] == 0
    assert harness.tokens[2] == expected([*prompt, 5], 8)
    harness.cache.check_invariants([])


def test_flush_is_refused_while_busy(folder: Path) -> None:
    harness = Harness(folder)
    harness.add(1, list(range(1, 20)), 5)
    harness.scheduler.step()
    harness.scheduler.receive([FlushCache(7)])
    harness.run()
    harness.scheduler.receive([FlushCache(8)])
    assert [(r.call_id, r.success) for r in harness.replies if isinstance(r, ControlReply)] == [
        (7, False),
        (8, True),
    ]
    assert harness.cache.pool.num_free == 64


def test_priority_policy(folder: Path) -> None:
    harness = Harness(folder, rows=1, policy="priority")
    for i, priority in ((1, 0), (2, 1), (3, 5)):
        harness.add(i, [i], 2, priority=priority)
    harness.run()
    assert list(harness.reasons) == [3, 2, 1]


def test_longest_prefix_policy(folder: Path) -> None:
    harness = Harness(folder, rows=1, policy="lpm")
    prompt = list(range(1, 20))
    harness.add(1, prompt, 2)
    harness.run()
    harness.add(2, [50, 51], 2)
    harness.add(3, prompt, 2)
    harness.run()
    assert list(harness.reasons) == [1, 3, 2]


class CountingCache(CacheManager):
    """Counts lookups of prompts in the tree, which are only for the order of the queue."""

    num_lookups = 0

    def match_length(self, tokens: Tokens, namespace: str) -> int:
        self.num_lookups += 1
        return super().match_length(tokens, namespace)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_queue_is_not_ordered_while_no_row_is_free(folder: Path, overlap: bool) -> None:
    harness = Harness(folder, rows=2, policy="lpm", overlap=overlap, cache=CountingCache)
    for i in (1, 2):
        harness.add(i, [i, 5, 6], 40)
    _steps(harness, 3)
    before = harness.cache.num_lookups
    for i in range(3, 13):
        harness.add(i, [i, 5, 6], 4)
    _steps(harness, 20)
    assert harness.cache.num_lookups == before
    harness.run()
    assert harness.cache.num_lookups > before
    assert sorted(harness.reasons) == list(range(1, 13))


def test_the_queue_is_not_ordered_again_while_pages_are_short(folder: Path) -> None:
    harness = Harness(folder, num_pages=16, policy="lpm", cache=CountingCache)
    harness.add(1, list(range(1, 21)), 30)
    _steps(harness, 4)
    for i in range(2, 12):
        harness.add(i, list(range(i, i + 50)), 4)
    _steps(harness, 1)
    before = harness.cache.num_lookups
    _steps(harness, 20)
    assert not harness.reasons
    assert harness.cache.num_lookups == before
    # A request that arrived meanwhile is considered.
    harness.add(12, [1, 2, 3, 4, 5], 4)
    _steps(harness, 1)
    assert harness.cache.num_lookups > before
    harness.run()
    assert sorted(harness.reasons) == list(range(1, 13))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    way=st.sampled_from(WAYS),
    num_pages=st.integers(20, 60),
    budget=st.sampled_from([None, 1, 5, 32]),
    prefix_cache=st.booleans(),
    num_state_slots=st.sampled_from([0, 3, 7, 16, 60]),
)
def test_random_traffic_is_exact_and_leaves_nothing_behind(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    way: dict[str, Any],
    num_pages: int,
    budget: int | None,
    prefix_cache: bool,
    num_state_slots: int,
) -> None:
    harness = Harness(
        tmp_path_factory.mktemp("run"),
        states={"num_state_slots": num_state_slots, "max_running": 5},
        **way,
        num_pages=num_pages,
        token_budget=budget,
        prefix_cache=prefix_cache,
        rows=5,
        context_len=80,
    )
    rng = np.random.default_rng(seed)
    prompts: dict[int, list[int]] = {}
    limits: dict[int, int] = {}
    stopped: set[int] = set()
    for _ in range(60):
        if rng.random() < 0.35:
            request_id = len(prompts) + 1
            shared = list(range(1, 1 + int(rng.integers(0, 30))))
            prompts[request_id] = [*shared, *rng.integers(1, 900, int(rng.integers(1, 8))).tolist()]
            limits[request_id] = int(rng.integers(0, 79 - len(prompts[request_id])))
            harness.add(request_id, prompts[request_id], limits[request_id])
        if prompts and rng.random() < 0.1:
            harness.scheduler.receive([AbortRequests([int(rng.integers(1, len(prompts) + 1))])])
        if prompts and rng.random() < 0.05:
            request_id = int(rng.integers(1, len(prompts) + 1))
            if request_id not in harness.reasons:
                stopped.add(request_id)
            harness.scheduler.receive([StopHit([request_id])])
        if rng.random() < 0.01:
            harness.scheduler.receive([AbortAll()])
        for _ in range(int(rng.integers(0, 4))):
            harness.scheduler.step()
        harness.scheduler.check_invariants()
    harness.run()
    for request_id, prompt in prompts.items():
        if request_id in stopped:
            continue
        tokens = harness.tokens[request_id]
        assert tokens == expected(prompt, len(tokens))
        if harness.reasons[request_id].type == "length":
            assert len(tokens) == limits[request_id]
    harness.cache.check_invariants([])
    harness.scheduler.receive([FlushCache(1)])
    assert harness.cache.pool.num_free == num_pages
    if harness.cache.states is not None:
        assert harness.cache.states.slots.num_free == num_state_slots


def test_stages_compute_different_steps(folder: Path) -> None:
    harness = Harness(folder, num_stages=3)
    prompts = {number: [number, 5, 6] for number in range(1, 8)}
    for number, prompt in prompts.items():
        harness.add(number, prompt, 30)
    _steps(harness, 12)
    # No step has more than its share of the seven rows.
    assert len(harness.staged.steps) == 2
    assert all(1 <= len(step.plan.rows) <= 3 for step in harness.staged.steps)
    # All have made progress.
    assert min(len(tokens) for tokens in harness.tokens.values()) >= 2
    before = harness.runner.num_steps
    harness.scheduler.receive([PauseGeneration(1, retract=True)])
    assert harness.runner.num_steps == before + 2
    assert not harness.staged.steps
    harness.scheduler.receive([ContinueGeneration(2)])
    harness.run()
    assert harness.staged.most_in_flight == 3
    assert harness.tokens == {n: expected(prompt, 30) for n, prompt in prompts.items()}


def test_a_prompt_in_parts_is_in_all_stages(folder: Path) -> None:
    harness = Harness(folder, num_stages=3, token_budget=4)
    harness.add(1, list(range(1, 41)), 4)
    _steps(harness, 2)
    assert [step.plan.start_lens.tolist() for step in harness.staged.steps] == [[0], [4]]
    harness.run()
    assert harness.tokens[1] == expected(list(range(1, 41)), 4)


def test_the_end_of_a_row_is_not_that_of_the_next_request(folder: Path) -> None:
    """A row fails in a step in flight, after its request was aborted and another one joined."""
    harness = Harness(folder, num_stages=3, rows=2)
    harness.add(1, [1, 666, 3], 20)
    harness.add(2, [2, 5, 6], 20)
    harness.scheduler.step()
    harness.scheduler.receive([AbortRequests([1])])
    harness.add(3, [7, 8, 9], 20)
    harness.runner.fail_rows_with_token = 666
    harness.run()
    assert harness.reasons[1].message == "Aborted"
    assert harness.tokens[2] == expected([2, 5, 6], 20)
    assert harness.tokens[3] == expected([7, 8, 9], 20)


def test_a_failed_plan_waits_for_what_the_stages_compute(folder: Path) -> None:
    harness = Harness(folder, num_stages=2)
    harness.add(1, [1, 2, 3], 20)
    harness.add(2, [4, 5, 6], 20)
    _steps(harness, 3)
    assert len(harness.staged.steps) == 1
    harness.cache.extend_each = harness.cache.extend = None  # type: ignore[assignment]
    _steps(harness, 4)
    assert not harness.staged.steps
    assert {each.status_code for each in harness.reasons.values()} == {500}


def test_streams_limit_the_prompt_tokens_of_a_step() -> None:
    def chunk(num_decodes: int, **bounds: Any) -> int:
        budget = TokenBudget(**{"alone": 64, "beside_streams": 8} | bounds)
        return budget.of_step(num_decodes, None).take(prompt, 0, 1000)

    prompt: Any = SimpleNamespace(images=[], reports=[], tokens=range(1000))
    assert chunk(0) == 64
    assert chunk(3) == 5
    # A full batch must not keep prompts out forever.
    assert chunk(50) == 2
    assert chunk(10, alone=None, beside_streams=None) == 1000
    assert chunk(10, splits_prompts=False) == 1000


def test_how_long_a_stream_waits_for_a_prompt() -> None:
    assert smooth_tokens(8_000_000_000, 8192) == 6144
    assert smooth_tokens(500_000_000, 8192) == 8192
    assert smooth_tokens(70_000_000_000, 8192) == 1024
    assert smooth_tokens(8_000_000_000, 2048) == 2048
