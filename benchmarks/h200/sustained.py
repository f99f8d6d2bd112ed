"""Times sustained device work, and samples the GPU's clock and power meanwhile.

A Hopper GPU at its power limit lowers its clock within milliseconds, so that a product timed alone
is faster than one product among many. Ways to compute the same result run in turns, so that the
warming of the GPU affects all of them.
"""

from __future__ import annotations

import os
import pty
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

_SAMPLE_MS = 25


@dataclass(frozen=True)
class Turn:
    """The microseconds of one call, and the mean clock (MHz) and power (W) of the GPU meanwhile."""

    us: float
    mhz: float | None
    watts: float | None


class Meter:
    """Samples clock and power of the current GPU with `nvidia-smi`, which a thread reads."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Meter:
        # The UUID, because CUDA_VISIBLE_DEVICES does not change it.
        device = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        for power in ("power.draw.instant", "power.draw"):
            query = ["nvidia-smi", "-i", device, f"--query-gpu=clocks.sm,{power}"]
            query.append("--format=csv,noheader,nounits")
            try:
                done = subprocess.run(query, capture_output=True, text=True, check=False)
            except OSError as error:
                print("no clock and power:", error)
                return self
            if done.returncode == 0 and _numbers(done.stdout):
                self._start([*query, f"--loop-ms={_SAMPLE_MS}"])
                return self
        print("no clock and power:", done.stdout.strip() or done.stderr.strip())
        return self

    def _start(self, command: list[str]) -> None:
        # The output goes to a pseudo-terminal, so that each line arrives as soon as it is written.
        ours, theirs = pty.openpty()
        self._process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL)
        os.close(theirs)
        threading.Thread(target=self._read, args=(ours,), daemon=True).start()

    def _read(self, terminal: int) -> None:
        with os.fdopen(terminal) as lines:
            try:
                for line in lines:
                    if numbers := _numbers(line):
                        self._samples.append((time.monotonic(), *numbers))
            except OSError:  # It ended.
                return

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def between(self, begin: float, end: float) -> tuple[float | None, float | None]:
        """Return the mean clock and power between two times of `time.monotonic`.

        Both are None if no sample lies between the times.
        """
        found = [sample[1:] for sample in self._samples if begin <= sample[0] <= end]
        if not found:
            return None, None
        return fmean(mhz for mhz, _ in found), fmean(watts for _, watts in found)


def _numbers(line: str) -> tuple[float, float] | None:
    try:
        mhz, watts = map(float, line.split(","))
    except ValueError:
        return None
    return mhz, watts


class Loop:
    """Calls in a CUDA graph, which is replayed for a given time."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        """Capture the calls.

        The calls should read different memory, as a model's layers do.
        """
        self._num_calls = len(calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            for call in calls:
                call()
        self._once_s = self._replay(1)
        self._once_s = self._replay(2) / 2

    def _replay(self, times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            self._graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def turn(self, seconds: float, meter: Meter) -> Turn:
        """Replay the graph for `seconds`; clock and power are sampled in the second half."""
        started = time.monotonic()
        replays = max(1, round(seconds / self._once_s))
        took = self._replay(replays)
        ended = time.monotonic()
        middle = (started + ended) / 2
        return Turn(took * 1e6 / replays / self._num_calls, *meter.between(middle, ended))


def in_turns(
    loops: Mapping[str, Loop], seconds: float, meter: Meter, rounds: int
) -> dict[str, list[Turn]]:
    """Run each loop for `seconds`, in turn, for `rounds` rounds; return all turns.

    The first loop runs once before, to warm the GPU up.
    """
    next(iter(loops.values())).turn(seconds / 2, meter)
    found: dict[str, list[Turn]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            found[name].append(loop.turn(seconds, meter))
    return found


def mean(turns: Sequence[Turn]) -> Turn:
    """Return the mean of several turns."""
    return Turn(
        fmean(turn.us for turn in turns),
        _mean_of([turn.mhz for turn in turns]),
        _mean_of([turn.watts for turn in turns]),
    )


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
