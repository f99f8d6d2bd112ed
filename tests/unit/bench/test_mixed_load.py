"""The parts of `benchmarks.mixed_load` that decide what was wrong."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ElementTree

import httpx
import pytest

from benchmarks.mixed_load import Totals, draw
from benchmarks.mixed_traffic import FRONT_AWAY, Kill, Outcomes
from benchmarks.process_watch import Life, slope_per_hour
from benchmarks.wire_streams import Reading, first_difference, is_beginning


def grown(per_hour: float, level: float = 100.0, seconds: int = 600) -> Life:
    times = [float(second) for second in range(0, seconds, 5)]
    values = [level + per_hour * when / 3600 for when in times]
    return Life("front", times, values, values, values)


def test_a_slope_is_found_behind_levels_and_settling() -> None:
    young = grown(7200, seconds=60)
    first, second = grown(12.0), grown(12.0, level=500.0)
    # Growth in the first seconds is not a leak.
    first.pss_mb[:5] = [10.0] * 5
    assert slope_per_hour([first, second, young], "pss_mb") == pytest.approx(12.0)
    assert slope_per_hour([young], "pss_mb") is None


@pytest.mark.parametrize(
    ("part", "is_right"),
    [
        ({"": {"text": "The mil"}}, True),
        ({"": {"text": ""}}, True),
        ({"": {"text": "The mull"}}, False),
        ({"": {"text": "The miller and more"}}, False),
        ({"": {"choices": {"0": {"delta": {"content": "a"}}}}}, True),
        ({"": {"choices": {"0": {"delta": {"content": "b"}}}}}, False),
        ({}, True),
    ],
)
def test_what_was_read_of_a_cut_answer_must_be_its_beginning(
    part: dict[str, object], is_right: bool
) -> None:
    whole = {"": {"text": "The miller", "choices": {"0": {"delta": {"content": "ab"}}}}}
    assert is_beginning(part, whole) == is_right


def test_the_first_difference_is_named() -> None:
    assert first_difference({"a": [1, 2]}, {"a": [1, 2]}) == ""
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}).startswith("/a/1/b")


def test_a_failure_is_right_only_beside_the_end_of_a_process() -> None:
    now = time.monotonic()
    begin = now - 1
    away = [Kill("front", now - 0.5), Kill("worker", now - 100, ready_at=now - 90)]
    none = [Kill("image decoder", now - 0.5, ready_at=now)]
    broken, refused = Reading(is_broken=True, error="x"), Reading(status=503, error="x")
    failed = Reading(status=500, error="x")
    for reading, kills, expected in (
        (broken, away, FRONT_AWAY),
        (broken, none, "wrong"),
        (refused, none, "wrong"),
        (refused, [Kill("worker", now - 100, ready_at=now - 90)], "wrong"),
        (failed, away, "wrong"),
    ):
        outcomes = Outcomes()
        outcomes.note_failure(begin, reading, "a request", kills)
        assert dict(outcomes.counts) == {expected: 1}
        assert bool(outcomes.wrong) == (expected == "wrong")


async def test_counters_go_on_behind_a_restart() -> None:
    values = iter([5, 9, 2, 3])

    def answer(_: httpx.Request) -> httpx.Response:
        line = f'sglang:num_retractions_total{{model_name="m"}} {next(values)}.0'
        return httpx.Response(200, text=line)

    totals = Totals()
    async with httpx.AsyncClient(
        transport=httpx.MockTransport(answer), base_url="http://server"
    ) as client:
        for _ in range(4):
            await totals.read(client)
    assert totals.counts["num_retractions_total"] == 9 + 3


def test_the_plot_is_wellformed() -> None:
    result = {
        "minutes": 10.0,
        "kills": [{"kind": "front", "at_s": 60.0}],
        "lives": [vars(grown(12.0)), vars(grown(0.0))],
        "outcomes": [(1.0, "as undisturbed"), (70.0, "wrong <b>")],
    }
    drawing = draw(result)
    ElementTree.fromstring(drawing)
    assert "as undisturbed" in drawing
    assert "<b>" not in drawing
