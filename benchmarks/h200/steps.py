"""Measures where the time goes, by kind of step, when many requests arrive at once.

    python -m benchmarks.h200.steps 0.5b --cases B C D [--json FILE]

This runs in the worker process itself, without other processes. The prompts of a case arrive
together. For each kind of step, this prints the number of steps, the time from the end of the
previous step to the end of this step, and the part of that time in which the host waited for the
device. If the host hardly waits, the host is the bottleneck. The row "end" is the host's work after
the last step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.h200.cases import FULL
from benchmarks.h200.engine_in_process import add, engine
from headrace.bench.environment import describe_environment, write_json
from headrace.bench.shapes import SHAPES, write_shape
from runtime.executor.graph_buckets import MIXED_SIZES
from runtime.executor.graph_runner import GraphRunner
from runtime.executor.model_runner import ModelRunner, PendingStep
from runtime.step.step_plan import StepPlan, StepResult
from tests.support.engine import InProcessEngine

CASES = {
    "B": (FULL.b_requests, FULL.a_input, FULL.a_output),
    "C": (FULL.c_requests, FULL.c_input, FULL.c_output),
    "D": (FULL.d_requests, FULL.d_input, 1),
}
_MANY = MIXED_SIZES[0]


class Watch:
    """Records the kind and end of each step, and how long the host waited for the step."""

    def __init__(self) -> None:
        self._in_graph = False
        self._kinds: dict[int, str] = {}
        # Each entry: kind of step, end of the step, and seconds that the host waited.
        self.steps: list[tuple[str, float, float]] = []
        launch, wait, run = ModelRunner.launch, PendingStep.wait, GraphRunner.run

        def noted_run(graphs: GraphRunner, *args: Any, **options: Any) -> Any:
            self._in_graph = True
            return run(graphs, *args, **options)

        def noted_launch(runner: ModelRunner, plan: StepPlan, *masks: Any) -> PendingStep:
            self._in_graph = False
            pending = launch(runner, plan, *masks)
            self._kinds[id(pending)] = self._kind(plan)
            return pending

        def timed_wait(pending: PendingStep) -> StepResult:
            began = time.perf_counter()
            result = wait(pending)
            done = time.perf_counter()
            self.steps.append((self._kinds.pop(id(pending)), done, done - began))
            return result

        GraphRunner.run = noted_run  # type: ignore[method-assign]
        ModelRunner.launch = noted_launch  # type: ignore[method-assign]
        PendingStep.wait = timed_wait  # type: ignore[method-assign]

    def clear(self) -> None:
        """Forget all recorded steps."""
        self._kinds.clear()
        self.steps.clear()

    def _kind(self, plan: StepPlan) -> str:
        if plan.num_decodes == len(plan.rows):
            return "decode"
        which = "graph" if self._in_graph else "no graph"
        if not plan.num_decodes:
            return f"prompts, {which}"
        size = f"more than {_MANY}" if len(plan.rows) > _MANY else f"up to {_MANY}"
        return f"prompts beside rows, {size}, {which}"


def measure(
    ours: InProcessEngine, watch: Watch, first_id: int, prompts: list[Any], output: int
) -> tuple[float, dict[str, dict[str, float]]]:
    """Run all prompts and compute their outputs, and measure the steps.

    Returns:
        The seconds of the whole run. For each kind of step: the number of steps, their total and
        median duration, and the time for which the host waited, in milliseconds.
    """
    torch.cuda.synchronize()
    watch.clear()
    began = time.perf_counter()
    add(ours, first_id, prompts, output)
    ours.run()
    ended = time.perf_counter()
    kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    before = began
    for kind, done, waited in watch.steps:
        kinds[kind].append((done - before, waited))
        before = done
    kinds["end"].append((ended - before, 0.0))
    return ended - began, {
        kind: {
            "steps": len(found),
            "total_ms": sum(step for step, _ in found) * 1e3,
            "waited_ms": sum(wait for _, wait in found) * 1e3,
            "median_ms": statistics.median(step for step, _ in found) * 1e3,
        }
        for kind, found in kinds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeat", type=int, default=4, help="runs of a case; the first warms up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    watch = Watch()
    vocab_size = SHAPES[options.shape]["vocab_size"]
    rng = np.random.default_rng(0)
    report: dict[str, Any] = {"environment": describe_environment()}
    next_id = 1
    with tempfile.TemporaryDirectory() as folder:
        ours = engine(write_shape(options.shape, Path(folder) / "model"))
        for case in options.cases:
            requests, length, output = CASES[case]
            runs = []
            for _ in range(options.repeat):
                prompts = [rng.integers(1, vocab_size, length) for _ in range(requests)]
                runs.append(measure(ours, watch, next_id, prompts, output))
                next_id += requests
            counted = sorted(runs[1:] or runs, key=lambda run: run[0])
            seconds, kinds = counted[len(counted) // 2]
            report[case] = {"duration_s": seconds, "steps": kinds}
            every = " ".join(f"{run[0]:.4f}" for run in runs)
            print(
                f"{case}: {seconds:.4f} s, {requests * output / seconds:.0f} output tok/s; {every}"
            )
            for kind, found in kinds.items():
                print(f"  {kind:45}", *(f"{key} {value:.2f}" for key, value in found.items()))
    if options.json:
        write_json(options.json, report)


if __name__ == "__main__":
    main()
