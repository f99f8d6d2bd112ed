"""Records traces of a rank's steps with torch's profiler, in files that Perfetto reads.

Prefill steps and decode steps may get a trace each. Profiling must not disturb serving: an error
here is logged, and the step continues.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from runtime.errors import InvalidRequest
from runtime.ipc.messages import ProfileSpec, Stage
from runtime.step.step_plan import StepPlan

logger = logging.getLogger(__name__)

WAIT_S = 120.0
_POLL_S = 0.1


def merge_when_written(sources: Sequence[Path], target: Path) -> threading.Thread:
    """Merge the trace files `sources` into `target` on a thread, once all of them are written."""
    thread = threading.Thread(
        target=_wait_and_merge, args=(sources, target), name="merge-traces", daemon=True
    )
    thread.start()
    return thread


def _wait_and_merge(sources: Sequence[Path], target: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not all(source.exists() for source in sources):
        if time.monotonic() > deadline:
            logger.error("Traces of some ranks are missing: %s is not written", target)
            return
        time.sleep(_POLL_S)
    try:
        merge(sources, target)
    except Exception:
        logger.exception("The traces could not be merged")


def merge(sources: Sequence[Path], target: Path) -> None:
    """Write one trace with the events of all `sources`, in which each rank has lanes of its own."""
    merged: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    for rank, source in enumerate(sources):
        with gzip.open(source, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        for event in trace.pop("traceEvents"):
            _move(event, rank, len(sources))
            events.append(event)
        merged = {**trace, **merged}
    part = target.with_name(f".{target.name}.part")
    with gzip.open(part, "wt", encoding="utf-8") as file:
        json.dump({**merged, "traceEvents": events}, file)
    os.replace(part, target)


def _move(event: dict[str, Any], rank: int, num_ranks: int) -> None:
    # A lane is identified by its process number. For GPU events this is the GPU's number, which may
    # be equal on all ranks.
    if "pid" in event:
        event["pid"] = f"TP-{rank} {event['pid']}"
    if event.get("name") == "process_name":
        event["args"]["name"] = f"TP-{rank} {event['args']['name']}"
    # An arrow between events is identified by a numeric id.
    if isinstance(event.get("id"), int):
        event["id"] = event["id"] * num_ranks + rank


_ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
# Clients usually request the activities CPU and GPU together, so GPU is ignored on a CPU. The
# activities below are rarely requested by accident, so they are refused on a CPU.
_GPU_ONLY = {"MEM", "CUDA_PROFILER"}
# Number of allocations that a memory snapshot shows.
_MAX_ALLOCATIONS = 100_000


class Profiler:
    """Records profiles of one rank, one at a time.

    Attributes:
        is_waiting: whether the runner must call `step` for each step.
        num_steps: number of steps launched so far; the runner counts them.
    """

    def __init__(
        self, device: str, rank: int, num_ranks: int = 1, dp_rank: int | None = None
    ) -> None:
        """Create a profiler that records nothing yet.

        Args:
            device: `cpu` or `cuda`.
            rank: rank of this process.
            num_ranks: number of ranks that share the layers.
            dp_rank: index of the replica, which becomes a part of file names; `None` if there is
                only one replica.
        """
        self._replica = "" if dp_rank is None else f"-DP-{dp_rank}"
        self.is_waiting = False
        self.num_steps = 0
        self._device = device
        self._rank = rank
        self._num_ranks = num_ranks
        self._spec: ProfileSpec | None = None
        self._stages: list[Stage | None] = []
        self._recording: _Recording | None = None
        self._num_recorded = 0

    def start(self, spec: ProfileSpec) -> None:
        """Start a profile, which records steps from `spec.start_step` on.

        Raises:
            InvalidRequest: a profile is running already, or an activity needs a GPU.
        """
        if self._spec is not None:
            raise InvalidRequest("A profile is already running; stop it first.")
        if self._device == "cpu" and (
            "CPU" not in spec.activities or not _GPU_ONLY.isdisjoint(spec.activities)
        ):
            raise InvalidRequest(
                f"activities {', '.join(spec.activities)} need a GPU; this model runs on the CPU.",
                param="activities",
            )
        self._spec = spec
        self._stages = [*spec.stages] or [None]
        self.is_waiting = True

    def stop(self) -> str:
        """Stop the profile, write the recorded steps, and return the folder of the files.

        Raises:
            InvalidRequest: no profile is running.
        """
        spec = self._spec
        if spec is None:
            raise InvalidRequest("No profile is running.")
        try:
            self._write()
        finally:
            self._spec, self._stages, self.is_waiting = None, [], False
        return spec.folder

    @contextlib.contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Context manager around a step's launch: records it if the profile includes the step."""
        spec = self._spec
        if spec is None or self.num_steps < spec.start_step:
            yield
            return
        stage: Stage = "EXTEND" if len(plan.rows) > plan.num_decodes else "DECODE"
        with self._guarded():
            self._prepare(spec, stage)
        yield
        with self._guarded():
            self._count(spec, stage)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            logger.exception("Profiling stopped after an error")
            self._spec, self._recording, self.is_waiting = None, None, False

    def _prepare(self, spec: ProfileSpec, stage: Stage) -> None:
        recording = self._recording
        if recording is not None:
            # If a requested stage gets no steps, the other stage must not wait for it.
            if recording.stage in (None, stage) or stage not in self._stages:
                return
            self._write()
        for wanted in (None, stage):
            if wanted in self._stages:
                self._stages.remove(wanted)
                self._recording = _Recording(spec, wanted, self._device)
                self._num_recorded = 0
                return

    def _count(self, spec: ProfileSpec, stage: Stage) -> None:
        if self._recording is None or self._recording.stage not in (None, stage):
            return
        self._num_recorded += 1
        if self._num_recorded >= spec.num_steps:
            self._write()
            if not self._stages:
                self.stop()

    def _write(self) -> None:
        recording, self._recording = self._recording, None
        spec = self._spec
        if recording is None or spec is None:
            return
        stage = f"-{recording.stage}" if recording.stage else ""
        name = f"{spec.name}-TP-{{rank}}{self._replica}{stage}"
        recording.write(Path(spec.folder), name.format(rank=self._rank))
        if spec.merge and self._rank == 0:
            folder = Path(spec.folder)
            names = [f"{name.format(rank=rank)}.trace.json.gz" for rank in range(self._num_ranks)]
            merge_when_written(
                [folder / each for each in names],
                folder / f"merged-{name.format(rank='all')}.trace.json.gz",
            )


class _Recording:
    """A trace that is being recorded."""

    def __init__(self, spec: ProfileSpec, stage: Stage | None, device: str) -> None:
        self.stage = stage
        self._on_cuda = device == "cuda"
        self._activities = spec.activities if self._on_cuda else ["CPU"]
        kinds = [_ACTIVITIES[each] for each in self._activities if each in _ACTIVITIES]
        self._profile: profile | None = None
        if kinds:
            self._profile = profile(
                activities=kinds,
                with_stack=spec.with_stack,
                record_shapes=spec.record_shapes,
                acc_events=True,
            )
            self._profile.start()
        if "MEM" in self._activities:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        if "CUDA_PROFILER" in self._activities:
            torch.cuda.cudart().cudaProfilerStart()

    def write(self, folder: Path, name: str) -> None:
        """End the trace and write its files, which have hidden names until they are complete."""
        if self._on_cuda:
            # Kernels of the last step may be running.
            torch.cuda.synchronize()
        if self._profile is not None:
            self._profile.stop()
            part = folder / f".{name}.part.json.gz"
            self._profile.export_chrome_trace(str(part))
            _show(part, folder / f"{name}.trace.json.gz")
        if "MEM" in self._activities:
            part = folder / f".{name}.part"
            torch.cuda.memory._dump_snapshot(str(part))
            torch.cuda.memory._record_memory_history(enabled=None)
            _show(part, folder / f"{name}-memory.pickle")
        if "CUDA_PROFILER" in self._activities:
            torch.cuda.cudart().cudaProfilerStop()


def _show(part: Path, path: Path) -> None:
    os.replace(part, path)
    logger.info("Profile written: %s", path)
