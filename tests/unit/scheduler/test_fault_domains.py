"""Any error while the scheduler handles one request ends only that request.

Each site is reached through the scheduler's inputs: a cache, or a request, that fails there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from runtime.cache.block_table import BlockTable
from runtime.cache.manager import CacheManager
from runtime.cache.page_pool import Pages
from runtime.cache.radix_tree import Tokens
from runtime.ipc.messages import AbortRequests, FlushCache
from runtime.ipc.weight_messages import ContinueGeneration, PauseGeneration
from runtime.requests.extra_spec import ExtraSpec
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from tests.support.scheduler_harness import Harness, expected
from tests.unit.scheduler.test_scheduler import WAYS

NUM_PAGES = 64
GUILTY = "guilty"
MAX_NEW = 24
PROMPTS = {number: [number, number + 1, *range(50, 50 + number)] for number in range(1, 7)}


class PlantedError(Exception):
    """The error that a site raises."""


class FaultyCache(CacheManager):
    """A cache that raises in one method for requests of the name space `GUILTY`.

    Attributes:
        site: the method, and whether it fails `before` or `after` its work.
        from_page: `extend` fails for requests with this many pages.
    """

    site: tuple[str, str] = ("", "")
    from_page = 0

    def _around(self, name: str, is_guilty: bool, work: Callable[[], Any]) -> Any:
        fails = is_guilty and self.site[0] == name
        if fails and self.site[1] == "before":
            raise PlantedError(name)
        result = work()
        if fails:
            raise PlantedError(name)
        return result

    def attach_prefix(self, block_table: BlockTable, tokens: Tokens, namespace: str) -> int:
        def work() -> int:
            return CacheManager.attach_prefix(self, block_table, tokens, namespace)

        found: int = self._around("attach_prefix", namespace == GUILTY, work)
        if namespace == GUILTY:
            self.guilty = {*getattr(self, "guilty", set()), block_table}
        return found

    def extend(self, block_table: BlockTable, num_tokens: int) -> bool:
        is_guilty = (
            block_table in getattr(self, "guilty", set())
            and block_table.num_pages >= self.from_page
        )
        done: bool = self._around(
            "extend", is_guilty, lambda: CacheManager.extend(self, block_table, num_tokens)
        )
        return done

    def share(self, block_table: BlockTable, tokens: Tokens, namespace: str) -> None:
        self._around(
            "share",
            namespace == GUILTY,
            lambda: CacheManager.share(self, block_table, tokens, namespace),
        )

    def release(self, block_table: BlockTable, tokens: Tokens, namespace: str) -> None:
        self._around(
            "release",
            namespace == GUILTY,
            lambda: CacheManager.release(self, block_table, tokens, namespace),
        )


class FaultySampling:
    """Sampling parameters with one that cannot be read."""

    def __init__(self, name: str) -> None:
        self._real = SamplingParams(max_new_tokens=MAX_NEW, seed=1)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise PlantedError(name)
        return getattr(self._real, name)


class Unreadable(list[int]):
    """Stop ids that cannot be compared with a token."""

    def __contains__(self, item: object) -> bool:
        raise PlantedError("stop ids")


class Unorderable(int):
    """A position that cannot be compared with the beginning of a chunk."""

    def __gt__(self, other: int) -> bool:
        raise PlantedError("position")


def guilty_spec(site: str) -> RequestSpec:
    sampling = SamplingParams(max_new_tokens=MAX_NEW, seed=1)
    extras: list[ExtraSpec] = []
    if site == "stop ids":
        sampling = SamplingParams(max_new_tokens=MAX_NEW, stop_token_ids=Unreadable([7]))
    elif site.startswith("sampling."):
        sampling = cast("SamplingParams", FaultySampling(site.partition(".")[2]))
    elif site == "position":
        extras = [ExtraSpec("logprobs", prompt_start=Unorderable(0), of_outputs=False)]
    return RequestSpec(row=RowSpec(sampling=sampling, extras=extras), cache_namespace=GUILTY)


def check_neighbours(harness: Harness, numbers: set[int]) -> None:
    """Check that each has the same text as alone, and that no page is held afterwards."""
    for number in numbers:
        assert harness.tokens[number] == expected(PROMPTS[number], MAX_NEW)
        assert harness.reasons[number].type == "length"
    shared = harness.shared
    gauges = ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "num_retracted_reqs")
    assert [shared[name] for name in gauges] == [0] * len(gauges)
    harness.cache.check_invariants([])
    harness.scheduler.receive([FlushCache(1)])
    assert harness.cache.pool.num_free == harness.cache.pool.num_pages
    # As many as there are rows: no row is lost.
    for number in range(900, 908):
        harness.add(number, [number], 3)
    harness.run()
    assert [harness.tokens[n] for n in range(900, 908)] == [
        expected([n], 3) for n in range(900, 908)
    ]


SITES = [
    *[
        f"{name} {when}"
        for name in ("attach_prefix", "extend", "share", "release")
        for when in ("before", "after")
    ],
    "stop ids",
    "sampling.skip_special_tokens",
    "sampling.stop_token_ids",
    "sampling.ignore_eos",
    "position",
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_pages", [NUM_PAGES, 26], ids=["roomy", "retracting"])
@pytest.mark.parametrize("site", SITES)
def test_only_the_faulty_requests_end(
    tmp_path: Path, site: str, num_pages: int, way: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(tmp_path, **way, num_pages=num_pages, cache=FaultyCache)
    name, _, when = site.partition(" ")
    harness.cache.site = (name, when)
    for number, prompt in PROMPTS.items():
        harness.add(number, prompt, MAX_NEW)
        # Faulty requests before, among and after the others, in separate and in shared steps.
        if number % 2:
            harness.send(100 + number, [*range(200, 220 + number)], guilty_spec(site))
        if number % 3 == 0:
            harness.scheduler.step()
    harness.run()
    for number in (101, 103, 105):
        reason = harness.reasons[number]
        # If its end was reported before the release of its pages failed, it has its whole text.
        if name == "release" and reason.type == "length":
            assert len(harness.tokens[number]) == MAX_NEW
        else:
            assert reason.status_code == 500
            (error_id,) = re.findall("details under id ([0-9a-f]{12})", reason.message or "")
            assert f"error id {error_id}" in caplog.text
    check_neighbours(harness, set(PROMPTS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failing_page_allocation_during_decode(
    tmp_path: Path, when: str, way: dict[str, Any]
) -> None:
    # Pages are scarce, so each output grows separately.
    harness = Harness(tmp_path, **way, num_pages=26, cache=FaultyCache)
    harness.cache.site, harness.cache.from_page = ("extend", when), 3
    for number, prompt in PROMPTS.items():
        harness.add(number, prompt, MAX_NEW)
        harness.send(100 + number, [200 + number], guilty_spec("extend"))
    harness.run()
    failed = [n for n, reason in harness.reasons.items() if reason.status_code == 500]
    assert failed
    assert all(n > 100 and harness.tokens[n] for n in failed), "not before their first token"
    check_neighbours(harness, set(PROMPTS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize(
    "site", ["release before", "release after", "sampling.skip_special_tokens"]
)
def test_a_failing_abort(tmp_path: Path, site: str, runs: bool, way: dict[str, Any]) -> None:
    harness = Harness(tmp_path, **way, cache=FaultyCache, rows=8 if runs else 3)
    name, _, when = site.partition(" ")
    harness.cache.site = (name, when)
    for number in (1, 2, 3):
        harness.add(number, PROMPTS[number], MAX_NEW)
    harness.send(100, [200, 201, 202], guilty_spec(site))
    harness.send(101, [300, 301, 302], guilty_spec(site))
    harness.scheduler.step()
    # Both in one message: the second is aborted although the first one fails.
    harness.scheduler.receive([AbortRequests([100, 101])])
    harness.run()
    assert {harness.reasons[number].type for number in (100, 101)} == {"abort"}
    for number in (1, 2, 3):
        assert harness.tokens[number] == expected(PROMPTS[number], MAX_NEW)
    assert harness.shared["num_running_reqs"] == harness.shared["num_used_tokens"] == 0
    harness.cache.check_invariants([])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failing_retraction_at_a_pause(tmp_path: Path, when: str, way: dict[str, Any]) -> None:
    harness = Harness(tmp_path, **way, cache=FaultyCache)
    harness.cache.site = ("release", when)
    for number, prompt in PROMPTS.items():
        harness.add(number, prompt, MAX_NEW)
    harness.send(100, [200, 201, 202], guilty_spec("release"))
    for _ in range(5):
        harness.scheduler.step()
    harness.scheduler.receive([PauseGeneration(1, retract=True), ContinueGeneration(2)])
    harness.run()
    assert harness.reasons[100].status_code == 500
    check_neighbours(harness, set(PROMPTS))


def test_a_failing_policy_keeps_the_order_of_arrival(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(tmp_path, rows=2, policy="priority")
    for number, prompt in PROMPTS.items():
        # Text and numbers have no order.
        priority = cast("int", "high") if number == 6 else number
        harness.add(number, prompt, MAX_NEW, priority=priority)
    harness.run()
    assert list(harness.tokens) == list(PROMPTS)
    check_neighbours(harness, set(PROMPTS))
    assert sum("policy failed" in record.message for record in caplog.records) == 1


class LeakyCache(CacheManager):
    """Takes pages for all rows at once and then fails, which is no request's fault."""

    fails = False

    def extend_each(self, block_tables: list[BlockTable]) -> Pages | None:
        if self.fails:
            self.pool.take(3)
            raise PlantedError("all")
        return super().extend_each(block_tables)


def test_a_failure_for_all_ends_all_requests_but_not_the_worker(tmp_path: Path) -> None:
    harness = Harness(tmp_path, cache=LeakyCache)
    for number in (1, 2, 3):
        harness.add(number, PROMPTS[number], MAX_NEW)
    harness.scheduler.step()
    harness.cache.fails = True
    harness.run()
    assert {reason.status_code for reason in harness.reasons.values()} == {500}
    harness.cache.fails = False
    for number in (4, 5, 6):
        harness.add(number, PROMPTS[number], MAX_NEW)
    harness.run()
    check_neighbours(harness, {4, 5, 6})


class StuckCache(CacheManager):
    """A cache that cannot be flushed."""

    def flush(self) -> None:
        raise PlantedError("flush")


def test_a_failed_call_gets_a_reply(tmp_path: Path) -> None:
    harness = Harness(tmp_path, cache=StuckCache)
    harness.scheduler.receive([FlushCache(7)])
    (reply,) = harness.replies
    assert (reply.call_id, reply.success) == (7, False)
    assert "the log has the details under id" in reply.message
