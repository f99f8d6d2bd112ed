"""Updates that fail on one rank: no rank waits for ever, and all ranks agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.ipc.messages import ControlReply
from runtime.ipc.weight_messages import (
    LoadFolder,
    RankReply,
    ReleaseMemory,
    RestoreGraphs,
    ResumeMemory,
    WeightCall,
    WeightOp,
)
from runtime.weights.weight_updates import WeightUpdates


class FakeRank:
    """Does nothing, and fails for some kinds of operation."""

    def __init__(self, number: int, *bad: type) -> None:
        self.number = number
        self.bad = bad
        self.done: list[str] = []
        self.can_compute = True

    def run(self, op: WeightOp) -> RankReply:
        self.done.append(type(op).__name__)
        return RankReply(self.number, not isinstance(op, self.bad), "planted")


class FakeOthers:
    """The ranks other than 0, in this process."""

    def __init__(self, *ranks: FakeRank) -> None:
        self.ranks = ranks
        self.op: WeightOp | None = None

    def ask(self, op: WeightOp) -> None:
        self.op = op

    def replies(self, beat: Callable[[], None]) -> list[RankReply]:
        assert self.op is not None
        return [rank.run(self.op) for rank in self.ranks]


def handle(op: WeightOp, *ranks: FakeRank) -> ControlReply:
    first, *others = ranks
    updates = WeightUpdates(first, FakeOthers(*others), lambda: None)  # type: ignore[arg-type]
    reply = updates.handle(WeightCall(7, op))
    # They compute together: all of them do the same in the same order.
    assert all(rank.done == first.done for rank in ranks)
    return reply


@pytest.mark.parametrize("bad", [0, 1])
def test_graphs_are_captured_when_every_rank_has_its_memory(bad: int) -> None:
    ranks = FakeRank(0), FakeRank(1)
    ranks[bad].bad = (ResumeMemory,)
    assert not handle(ResumeMemory([]), *ranks).success
    assert ranks[0].done == ["ResumeMemory"]
    ranks = FakeRank(0), FakeRank(1)
    assert handle(ResumeMemory([]), *ranks).success
    assert ranks[0].done == ["ResumeMemory", "RestoreGraphs"]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_without_graphs_removes_those_of_the_others(bad: int) -> None:
    ranks = FakeRank(0), FakeRank(1)
    ranks[bad].bad = (RestoreGraphs,)
    assert not handle(ResumeMemory([]), *ranks).success
    assert ranks[0].done == ["ResumeMemory", "RestoreGraphs", "ReleaseMemory"]
    # The update itself still succeeds.
    ranks[0].done, ranks[1].done = [], []
    assert handle(LoadFolder("/x"), *ranks).success
    assert ranks[0].done == ["LoadFolder", "KeepUpdate", "RestoreGraphs", "ReleaseMemory"]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_failed_update_captures_nothing(bad: int) -> None:
    ranks = FakeRank(0), FakeRank(1)
    ranks[bad].bad = (LoadFolder,)
    assert not handle(LoadFolder("/x"), *ranks).success
    assert ranks[0].done == ["LoadFolder", "UndoUpdate"]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_release_that_fails_on_a_rank_is_undone_on_all(bad: int) -> None:
    ranks = FakeRank(0), FakeRank(1)
    ranks[bad].bad = (ReleaseMemory,)
    assert not handle(ReleaseMemory([]), *ranks).success
    assert ranks[0].done == ["ReleaseMemory", "ResumeMemory", "RestoreGraphs"]
