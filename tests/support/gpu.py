"""What the tests under `tests/gpu` share: their device, a small engine, a load, its answers."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.extras.logprobs.positions import LogprobSpec
from tests.support.engine import InProcessEngine

ASKED = os.environ.get("HEADRACE_TEST_DEVICE")
DEVICE = ASKED or ("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="has no CPU form")
TOLERANCE = 1e-3

# So many rows that decoding rows beside a prompt have a graph, too; prompts are cut.
OPTIONS: dict[str, Any] = {
    "device": DEVICE,
    "overlap": True,
    "max_running_requests": 96,
    "chunked_prefill_size": 64,
    "max_total_tokens": 32 * 256,
}


def small_engine(folder: Path, **options: Any) -> InProcessEngine:
    """A float32 engine with graphs: its tokens do not depend on who computes beside whom."""
    return InProcessEngine(folder, **(OPTIONS | options))


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


# Beginnings of the first are found in the cache by the second; the last is cut twice.
PROMPTS = [prompt(70, 0), prompt(70, 0)[:50] + prompt(9, 1), prompt(5, 2), prompt(33, 3)]
PROMPTS += [prompt(16, 4), prompt(140, 5)]
NUM_NEW = 20

Answers = list[tuple[list[int], list[float]]]


def answers(engine: InProcessEngine) -> Answers:
    """Tokens and log-probabilities of the load, which reports the latter for every other one."""
    first = max(engine.tokens, default=0) + 1
    for i, ids in enumerate(PROMPTS):
        engine.add(first + i, ids, NUM_NEW, LogprobSpec() if i % 2 else None, ignore_eos=True)
        # They join a batch that is running.
        engine.scheduler.step()
    engine.run()
    numbers = range(first, first + len(PROMPTS))
    assert all(engine.reasons[number].type == "length" for number in numbers)
    return [
        (engine.tokens[number], [each.logprob for each in engine.outputs[number]])
        for number in numbers
    ]


def assert_same(found: Answers, expected: Answers) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=TOLERANCE)


def count_graphs(engine: InProcessEngine, patch: pytest.MonkeyPatch) -> Counter[str]:
    """How often graphs of each kind run from now on."""
    counts: Counter[str] = Counter()

    def counted(name: str, run: Any) -> Any:
        def run_and_count(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return run(*args, **options)

        return run_and_count

    graphs = {"decode": engine.runner._graphs, "prompt": engine.runner._extend_graphs}
    for name, each in graphs.items():
        assert each is not None
        patch.setattr(each, "run", counted(name, each.run))
    return counts


def graphs_of(engine: InProcessEngine) -> list[object]:
    """The graphs that are captured now."""
    decode, extend = engine.runner._graphs, engine.runner._extend_graphs
    assert decode is not None
    assert extend is not None
    captured = [*decode._graphs.values(), *decode._sharing.values()]
    return [*captured, *(each.graph for each in extend._graphs.values())]
