"""What the tests under `tests/gpu` share: the device, a small engine, requests, their answers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from runtime.executor.graph_buckets import Bucket
from runtime.executor.graph_capture import Graph
from runtime.executor.graph_runner import GraphRunner
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.step.step_plan import Int64Array, StepPlan
from tests.support.engine import InProcessEngine

ASKED = os.environ.get("HEADRACE_TEST_DEVICE")
DEVICE = ASKED or ("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="has no CPU form")
TOLERANCE = 1e-3

Result = TypeVar("Result")

# There are so many rows that a prompt beside decoding rows has a CUDA graph, too. Prompts are split
# into chunks.
OPTIONS: dict[str, Any] = {
    "device": DEVICE,
    "overlap": True,
    "max_running_requests": 96,
    "chunked_prefill_size": 64,
    "max_total_tokens": 32 * 256,
}

# Options with which an engine's tokens do not depend on the batch. float32 uses other kernels than
# serving does. In bfloat16, the batch-invariant kernels give the same bits in every batch.
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "deterministic": True},
}
in_both_precisions = pytest.mark.parametrize(
    "precision",
    ["float32", pytest.param("bfloat16", marks=on_gpu)],
    indirect=True,
    scope="module",
)


def small_engine(folder: Path, **options: Any) -> InProcessEngine:
    """Return an engine with CUDA graphs, in float32 or in the test's `precision`."""
    return InProcessEngine(folder, **(OPTIONS | options))


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


# The second prompt begins with a cached prefix of the first one. The last prompt has three chunks.
PROMPTS = [prompt(70, 0), prompt(70, 0)[:50] + prompt(9, 1), prompt(5, 2), prompt(33, 3)]
PROMPTS += [prompt(16, 4), prompt(140, 5)]
NUM_NEW = 20

Answers = list[tuple[list[int], list[float]]]


def answers(engine: InProcessEngine) -> Answers:
    """Run the requests; return their tokens, and every other request's log-probabilities."""
    first = max(engine.tokens, default=0) + 1
    for i, ids in enumerate(PROMPTS):
        engine.add(first + i, ids, NUM_NEW, LogprobSpec() if i % 2 else None, ignore_eos=True)
        # A step runs after each request, so that the others join a running batch.
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


def captured(work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
    """Return a CUDA graph of `work`, which runs once before it is captured, and its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = work()
    torch.cuda.synchronize()
    return graph.replay, result


def graph_runner(engine: InProcessEngine) -> GraphRunner:
    """Return the engine's runner of CUDA graphs."""
    graphs = engine.runner._graphs
    assert graphs is not None
    return graphs


def count_graphs(engine: InProcessEngine, patch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of the CUDA graphs that run from now on, decode-only ones and others."""
    counts: Counter[str] = Counter()
    graphs = graph_runner(engine)
    run = graphs.run

    def run_and_count(bucket: Bucket, plan: StepPlan, *, wants_logits: bool) -> Int64Array:
        counts["decode" if bucket.decodes else "prompt"] += 1
        return run(bucket, plan, wants_logits=wants_logits)

    patch.setattr(graphs, "run", run_and_count)
    return counts


def graphs_of(engine: InProcessEngine) -> list[Graph]:
    """Return the CUDA graphs that are captured now."""
    return list(graph_runner(engine)._graphs.values())
