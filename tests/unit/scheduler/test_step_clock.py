"""What a request is told of its time: stages in order, waits by reason, neighbors, its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.ipc.time_messages import RequestTimes, Wait, WorkerTimes
from runtime.scheduler.step_clock import StepClock, TimeRecord
from tests.support.scheduler_harness import PAGE, Harness


def told(harness: Harness) -> dict[int, WorkerTimes]:
    found = [each for each in harness.replies if isinstance(each, RequestTimes)]
    return {times.request_id: times for message in found for times in message.ended}


@pytest.mark.parametrize("overlap", [False, True])
def test_every_end_is_told_once(tmp_path: Path, overlap: bool) -> None:
    harness = Harness(tmp_path, overlap=overlap)
    for request_id in range(1, 13):
        harness.add(request_id, [request_id, 5, 6, 7, 8], 6, ignore_eos=True)
    harness.add(13, [1] * 200, 1)  # Refused: it can never fit.
    harness.run()
    times = told(harness)
    count = sum(len(each.ended) for each in harness.replies if isinstance(each, RequestTimes))
    assert (sorted(times), count) == (list(range(1, 14)), 13)
    assert not times[13].admitted_at
    for request_id in range(1, 13):
        each = times[request_id]
        moments = (each.received_at, each.queued_at, each.admitted_at, each.prompt_done_at)
        assert list(moments) == sorted(moments)
        assert each.prompt_done_at <= each.ended_at
        assert 0 < sum(each.waits) <= each.ended_at - each.received_at
        assert each.plain_steps + each.mixed_steps >= 5
        assert 0 < each.plain_s + each.mixed_s <= each.ended_at - each.admitted_at
        assert sum(chunk.num_tokens for chunk in each.chunks) == each.num_computed == 5
    # Eight rows: the later ones waited for them.
    assert times[12].waits[Wait.ROWS] > 0
    assert not times[1].waits[Wait.ROWS]


def test_the_place_where_a_prompt_leaves_the_cache(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    first = [*range(1, 4 * PAGE + 1)]
    prompts = {
        1: first,
        2: [*first[: 2 * PAGE + 1], 90, 91, 92, 93, 94],
        3: [*first, *range(50, 60)],
        4: [80, 81, 82, 83, 84],
        5: [*first[: PAGE + 2], 70],
    }
    for request_id, prompt in prompts.items():
        harness.add(request_id, prompt, 1, ignore_eos=True)
        harness.run()
    times = told(harness)
    found = {each: (times[each].prefix, times[each].is_cache_empty) for each in prompts}
    places = {
        each: None if prefix is None else (prefix.index, prefix.differs)
        for each, (prefix, _) in found.items()
    }
    assert places == {
        1: (0, False),
        2: (2 * PAGE + 1, True),
        3: (4 * PAGE, False),
        4: (0, True),
        5: (PAGE + 2, True),
    }
    assert [each for each, (_, is_empty) in found.items() if is_empty] == [1]
    harness.add(6, first, 1)
    harness.run()
    assert told(harness)[6].prefix is None


def test_what_a_request_alone_waits_for_ends() -> None:
    clock = StepClock()
    clock.wait_for(Wait.ROWS)
    passes, stays = TimeRecord(1, 0.0), TimeRecord(2, 0.0)
    for record in (passes, stays):
        record.queued(clock)
        record.skipped(Wait.ADAPTER)
        record.skipped(Wait.SHARED)
        record.skipped(Wait.SHARED)
    passes.passed()
    before = passes.told.waits.copy()
    assert before[Wait.ADAPTER] > 0
    assert before[Wait.SHARED] > 0
    clock.wait_for(Wait.PAGES)
    passes.admitted(0, None, is_empty=False)
    after = passes.told.waits
    assert after[Wait.PAGES] > 0
    assert (after[Wait.ADAPTER], after[Wait.SHARED]) == (before[Wait.ADAPTER], before[Wait.SHARED])
    # Another ends while it still waits.
    stays.ended(clock, 0)
    waits = stays.told.waits
    assert waits[Wait.SHARED] > before[Wait.SHARED]
    assert not waits[Wait.PAGES]
    for told in (passes.told, stays.told):
        end = told.admitted_at or told.ended_at
        assert sum(told.waits) == pytest.approx(end - told.queued_at, abs=0.05)


def test_too_few_slots_of_states_are_told_by_name(tmp_path: Path) -> None:
    harness = Harness(tmp_path, states={"num_state_slots": 3, "max_running": 8})
    for request_id in (1, 2):
        harness.add(request_id, [request_id, 5, 6, 7, 8], 6, ignore_eos=True)
    harness.run()
    waits = told(harness)[2].waits
    assert waits[Wait.STATES] > 0
    assert not waits[Wait.PAGES]


def test_the_slowest_neighbor_is_another_one() -> None:
    clock = StepClock()
    mine, other = TimeRecord(1, 0.0), TimeRecord(2, 0.0)
    mine.queued(clock)
    mine.admitted(0, None, is_empty=False)
    clock.stepped(clock.planned([(mine, 0, 900)], Wait.STEP), has_images=False)
    mine.prompt_done()
    clock.stepped(clock.planned([(other, 0, 300), (mine, 900, 7)], Wait.STEP), has_images=False)
    clock.stepped(clock.planned([], Wait.STEP), has_images=False)
    mine.ended(clock, 0)
    (times,) = clock.take_ended()
    assert times.neighbor is not None
    assert (times.neighbor.request_id, times.neighbor.num_prompt_tokens) == (2, 307)
    assert (times.plain_steps, times.mixed_steps, times.num_computed) == (1, 1, 907)
