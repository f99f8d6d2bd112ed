"""The log and the gauge show the actual throughput."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest

from runtime.cache.manager import CacheManager
from runtime.ipc.shared_state import SharedState
from runtime.scheduler.adapter_places import AdapterPlaces
from runtime.scheduler.stats import SchedulerStats
from runtime.scheduler.table import RequestTable
from runtime.step.step_plan import StepPlan

STEP_S = 0.05
LINE = re.compile(r"Decode: \d+ running, \d+ waiting, .* used, ([\d.]+) tokens/s")


class Load:
    """A scheduler's reports, on a simulated clock."""

    def __init__(self, folder: Path, log_interval: int = 40) -> None:
        self.shared = SharedState(folder / "state", create=True)
        self.stats = SchedulerStats(self.shared, log_interval)
        self.now = 1_000_000.0
        self.num_generated = 0
        self.gauges: list[float] = []
        self._table = RequestTable(4, 16)
        self._cache = CacheManager(8, 4, enable_prefix_cache=True)

    def report(self, *, has_work: bool) -> None:
        self.stats.publish(
            now=self.now,
            has_work=has_work,
            table=self._table,
            cache=self._cache,
            num_waiting=0,
            num_retracted=0,
            num_generated=self.num_generated,
            num_retractions=0,
            num_nan=0,
            num_prefix_hits=0,
            adapters=AdapterPlaces(0),
        )
        self.gauges.append(self.shared["gen_throughput"])

    def decode(self, num_steps: int, num_rows: int, *, ends_each: bool = False) -> None:
        """Take steps of `STEP_S`; with `ends_each` the worker is idle after each."""
        for _ in range(num_steps):
            self.stats.count_step(_decode_plan(num_rows))
            self.now += STEP_S
            self.num_generated += num_rows
            self.report(has_work=not ends_each)

    def idle(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.report(has_work=False)


def _decode_plan(num_rows: int) -> StepPlan:
    rows = np.arange(num_rows, dtype=np.int64)
    ones = np.ones(num_rows, dtype=np.int64)
    return StepPlan(
        rows=rows,
        num_decodes=num_rows,
        start_lens=ones,
        query_lens=ones,
        chunk_tokens=np.empty(0, dtype=np.int32),
        samples=ones.astype(bool),
        joins=[],
        page_updates=[],
    )


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return Load(tmp_path)


def lines(caplog: pytest.LogCaptureFixture) -> list[float]:
    found = (LINE.fullmatch(record.getMessage()) for record in caplog.records)
    return [float(match[1]) for match in found if match]


@pytest.mark.parametrize("ends_each", [False, True])
def test_instants_without_work_do_not_zero_the_rate(
    load: Load, caplog: pytest.LogCaptureFixture, ends_each: bool
) -> None:
    caplog.set_level(logging.INFO)
    load.decode(600, 3, ends_each=ends_each)
    shown = lines(caplog)
    # 30 seconds, a line for five of them.
    assert 5 <= len(shown) <= 6
    assert shown == pytest.approx([3 / STEP_S] * len(shown), rel=0.02)
    assert load.gauges[100:] == pytest.approx([3 / STEP_S] * 500, rel=0.02)


def test_short_requests_far_apart_make_few_lines(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(60):
        load.decode(20, 1)
        load.idle(10)
    shown = lines(caplog)
    # 60 seconds of work in 11 minutes; the ten idle seconds between do not count.
    assert 6 <= len(shown) <= 24
    assert all(0.4 / STEP_S < rate <= 1 / STEP_S for rate in shown)


def test_a_server_without_work_shows_zero_and_logs_nothing(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load.decode(200, 2)
    assert load.shared["gen_throughput"] == pytest.approx(2 / STEP_S, rel=0.02)
    before = len(lines(caplog))
    load.idle(3600)
    assert load.shared["gen_throughput"] == 0
    assert len(lines(caplog)) <= before + 1


def test_a_log_line_waits_for_the_configured_number_of_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load = Load(tmp_path, log_interval=400)
    load.decode(1000, 1)
    assert len(lines(caplog)) == 2
