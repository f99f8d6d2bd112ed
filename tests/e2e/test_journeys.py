"""A real request passes through the functions that `docs/where-am-i.md` lists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module

import pytest

from tests.support.server import ROOT, python_path
from tools.count_hops import (
    ENTRY,
    STATIONS,
    TITLES,
    Hop,
    counts,
    height_of,
    hops_of,
    renewed,
    rooms_in_order,
)

PAGE = ROOT / "docs" / "where-am-i.md"


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Hop]]:
    done = subprocess.run(
        [sys.executable, "-m", "tools.count_hops", "--json"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            "TMPDIR": str(tmp_path_factory.mktemp("run")),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout)
    return {name: [Hop(**each) for each in hops] for name, hops in plain.items()}


def section(journey: str) -> str:
    _, found, rest = PAGE.read_text().partition(f"\n## {TITLES[journey]}\n")
    assert found
    return rest.partition("\n## ")[0]


def listed(journey: str) -> list[tuple[str, str]]:
    """(process, function) of each entry."""
    entries = []
    for part in section(journey).split("\n### ")[1:]:
        process = part.partition("\n")[0].strip()
        entries += [(process, function) for function, _ in ENTRY.findall(part)]
    return entries


@pytest.mark.parametrize("journey", STATIONS)
def test_the_page_lists_every_hop_in_order_and_nothing_else(
    journey: str, followed: dict[str, list[Hop]]
) -> None:
    # After a change: `python -m tools.count_hops --renew docs/where-am-i.md`.
    assert listed(journey) == [(hop.process, hop.function) for hop in followed[journey]]


def test_a_renewal_of_the_page_changes_nothing(followed: dict[str, list[Hop]]) -> None:
    page = PAGE.read_text()
    assert renewed(page, followed) == page


@pytest.mark.parametrize("journey", STATIONS)
def test_the_page_tells_the_counts_and_marks_the_climbs(
    journey: str, followed: dict[str, list[Hop]]
) -> None:
    hops = followed[journey]
    climbs = [hop.function for hop in hops if hop.is_climb]
    assert f"{counts(hops)}." in section(journey)
    entries = ENTRY.findall(section(journey))
    assert [function for function, text in entries if "(a climb, from" in text] == climbs


@pytest.mark.parametrize("journey", STATIONS)
def test_every_function_of_the_page_is_where_it_says(journey: str) -> None:
    for _, function in listed(journey):
        module, _, name = function.partition(":")
        found: object = import_module(module)
        for part in name.split("."):
            # What is made inside a function has no name outside it.
            if getattr(found, part, None) is None and callable(found):
                break
            found = getattr(found, part)


ROOMS = [
    ("server",),
    ("runtime.scheduler",),
    ("runtime.distributed", "runtime.cache"),
    ("kernels",),
]


def test_a_hop_enters_another_module_and_counts_once() -> None:
    stack = [("server.app", "call"), ("server.app", "inner"), ("runtime.cache.manager", "extend")]
    again = [*stack, ("runtime.cache.page_pool", "take")]
    hops = hops_of([("front", stack), ("front", again)], ROOMS)
    assert [hop.function for hop in hops] == [
        "server.app:call",
        "runtime.cache.manager:extend",
        "runtime.cache.page_pool:take",
    ]
    assert [hop.caller for hop in hops] == ["", "server.app", "runtime.cache.manager"]
    assert not any(hop.is_climb for hop in hops)


def test_a_climb_is_a_call_from_a_lower_room() -> None:
    stack = [("kernels.rope", "rope"), ("runtime.cache.manager", "extend"), ("server.app", "call")]
    hops = hops_of([("worker", stack)], ROOMS)
    assert [hop.is_climb for hop in hops] == [False, True, True]
    level = [("runtime.cache.manager", "a"), ("runtime.distributed.group", "b")]
    assert not any(hop.is_climb for hop in hops_of([("worker", level)], ROOMS))


def test_what_returns_before_the_next_hand_over_does_not_hand_on() -> None:
    asked = [("server.app", "call"), ("runtime.cache.manager", "extend")]
    handed = [("server.app", "call"), ("kernels.rope", "rope")]
    hops = hops_of([("front", asked), ("front", handed)], ROOMS, (), ["kernels.rope:rope"])
    assert [(hop.function, hop.hands_on) for hop in hops] == [
        ("server.app:call", True),
        ("runtime.cache.manager:extend", False),
        ("kernels.rope:rope", True),
    ]
    assert counts(hops) == "3 hops, 0 climbs; 2 hand on"


def test_what_waits_in_the_front_is_no_hop_of_the_token() -> None:
    way = [("server.app", "call"), ("runtime.cache.manager", "extend")]
    before = hops_of([("front", way[:1])], ROOMS)
    assert [hop.function for hop in hops_of([("front", way)], ROOMS, before)] == [
        "runtime.cache.manager:extend"
    ]
    assert len(hops_of([("worker", way)], ROOMS, before)) == 2


def test_rooms_come_in_the_order_of_imports() -> None:
    rooms = rooms_in_order()
    order = ("runtime.errors", "runtime.client", "runtime.scheduler", "server", "headrace")
    heights = [height_of(module, rooms) for module in order]
    assert heights == sorted(set(heights))
    assert height_of("kernels.norm", rooms) == 0
    with pytest.raises(ValueError, match=r"tools\.count_hops is in no room"):
        height_of("tools.count_hops", rooms)


def test_a_renewed_page_keeps_what_was_said_and_marks_climbs() -> None:
    page = (
        "# P\n\n## A prompt in\n\n9 hops, 9 climbs.\n\n### front\n\n- `a:gone`: left\n"
        "- `server.app:call`: mine\n  and longer\n\n## A token back\n\n0 hops, 0 climbs.\n"
    )
    hops = [
        Hop("front", "server.app:call", "", False),
        Hop("worker", "tools.count_hops:height_of", "kernels.norm", True, hands_on=False),
    ]
    once = renewed(page, {"prompt": hops})
    said = "return the index of a module's package in the import order, 0 at the bottom"
    assert once == (
        "# P\n\n## A prompt in\n\n2 hops, 1 climbs; 1 hand on.\n\n### front\n\n"
        "- `server.app:call`: mine and longer\n\n"
        f"### worker\n\n- `tools.count_hops:height_of`: asked: {said} (a\n"
        "  climb, from `kernels`)\n"
        "\n## A token back\n\n0 hops, 0 climbs.\n"
    )
    assert renewed(once, {"prompt": hops}) == once
    with pytest.raises(LookupError, match="no section 'A token back'"):
        renewed("# P\n", {"token": hops})
