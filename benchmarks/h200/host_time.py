"""Measures the host's time for a decode step.

    python -m benchmarks.h200.host_time [--shape 0.5b] [--batch 64 256] [--json FILE]

This runs in the worker process itself, without HTTP. The time covers the scheduler's step and its
message to the detokenizer, but not the wait for the device. With overlap, the host's time is hidden
as long as it is shorter than the device's time. `launch_ms` is the part for launching the device's
work; `replay_ms` is the part of `launch_ms` that the driver needs to launch the graph. The row
`prompt` is the first step of one new prompt of 512 tokens on an idle worker, where the host's time
is not hidden. `--device cpu --shape tiny` runs on any machine; the launch itself computes there,
and there is no wait.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from headrace.bench.environment import describe_environment, write_json
from headrace.bench.shapes import SHAPES, write_shape
from runtime.executor.model_runner import ModelRunner, PendingStep
from runtime.ipc.messages import TokenDeltas
from runtime.ipc.transport import Outbox
from runtime.step.step_plan import StepPlan, StepResult
from tests.support.engine import InProcessEngine

PROMPT_LEN, STEPS = 128, 200
ALONE_LEN, ALONE_TIMES = 512, 30


class Clock:
    """Adds up the time that a step spends on launching and on waiting."""

    def __init__(self) -> None:
        self.launch_s = self.wait_s = self.replay_s = 0.0
        launch, wait = ModelRunner.launch, PendingStep.wait
        replay = torch.cuda.CUDAGraph.replay

        def timed_launch(runner: ModelRunner, plan: StepPlan, *masks: Any) -> PendingStep:
            began = time.perf_counter()
            pending = launch(runner, plan, *masks)
            self.launch_s += time.perf_counter() - began
            return pending

        def timed_wait(pending: PendingStep) -> StepResult:
            began = time.perf_counter()
            if pending._event is not None:
                pending._event.synchronize()
            self.wait_s += time.perf_counter() - began
            return wait(pending)

        def timed_replay(graph: torch.cuda.CUDAGraph) -> None:
            began = time.perf_counter()
            replay(graph)
            self.replay_s += time.perf_counter() - began

        torch.cuda.CUDAGraph.replay = timed_replay  # type: ignore[method-assign]
        ModelRunner.launch = timed_launch  # type: ignore[method-assign]
        PendingStep.wait = timed_wait  # type: ignore[method-assign]


class Detokenizer:
    """Receives the worker's messages through a socket and counts their tokens."""

    def __init__(self, folder: Path, engine: InProcessEngine) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"ipc://{folder}/tokens"
        self._inbox = context.socket(zmq.PULL)
        self._inbox.bind(address)
        self._outbox = Outbox(context, address)
        self.num_tokens = 0
        engine.scheduler._send_tokens = self._send

    def _send(self, message: TokenDeltas) -> None:
        self._outbox.send(message)
        self.num_tokens += len(message.request_ids)

    def drain(self) -> None:
        while self._inbox.poll(0):
            self._inbox.recv()


def measure(
    engine: InProcessEngine, detokenizer: Detokenizer, clock: Clock, batch: int, vocab_size: int
) -> dict[str, float]:
    """Return the medians over decode steps of a full batch, in milliseconds."""
    rng = np.random.default_rng(0)
    for request_id in range(1000 * batch, 1001 * batch):
        # The lengths differ, so that the requests need new KV cache pages in different steps.
        prompt = rng.integers(1, vocab_size, PROMPT_LEN + int(rng.integers(0, 16))).tolist()
        engine.add(request_id, prompt, STEPS + 60, ignore_eos=True)
    detokenizer.num_tokens = 0
    while detokenizer.num_tokens < 20 * batch:
        engine.scheduler.step()
        detokenizer.drain()
    found = []
    for _ in range(STEPS):
        found.append(timed_step(engine, clock))
        detokenizer.drain()
    engine.run()
    return medians(found)


def measure_prompt(
    engine: InProcessEngine, detokenizer: Detokenizer, clock: Clock, vocab_size: int
) -> dict[str, float]:
    """Return the medians over first steps of prompts that arrive alone, in milliseconds."""
    rng = np.random.default_rng(1)
    found = []
    for request_id in range(1, ALONE_TIMES + 1):
        engine.add(request_id, rng.integers(1, vocab_size, ALONE_LEN).tolist(), 2, ignore_eos=True)
        found.append(timed_step(engine, clock))
        engine.run()
        detokenizer.drain()
    return medians(found)


def timed_step(engine: InProcessEngine, clock: Clock) -> dict[str, float]:
    clock.launch_s = clock.wait_s = clock.replay_s = 0.0
    began = time.perf_counter()
    engine.scheduler.step()
    taken = time.perf_counter() - began
    seconds = {"step": taken, "host": taken - clock.wait_s}
    seconds |= {"launch": clock.launch_s, "replay": clock.replay_s}
    return {f"{name}_ms": value * 1e3 for name, value in seconds.items()}


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.5b", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    vocab_size = SHAPES[options.shape]["vocab_size"]
    report: dict[str, dict[str, float]] = {}
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        engine = InProcessEngine(
            write_shape(options.shape, Path(folder) / "model"),
            device=options.device,
            dtype="bfloat16",
            load_format="dummy",
            context_len=1024,
            max_total_tokens=max(max(options.batch) * 512, ALONE_TIMES * 1024),
            max_running_requests=max(options.batch),
            overlap=options.device == "cuda",
        )
        detokenizer = Detokenizer(Path(folder), engine)
        report["prompt"] = measure_prompt(engine, detokenizer, clock, vocab_size)
        for batch in options.batch:
            report[str(batch)] = measure(engine, detokenizer, clock, batch, vocab_size)
        for name, row in report.items():
            print(name, {key: round(value, 3) for key, value in row.items()})
    if options.json:
        write_json(options.json, {"environment": describe_environment(), **report})


if __name__ == "__main__":
    main()
