"""Prints the kernels of one decode step in the order of their starts, from torch's profiler.

    python -m benchmarks.h200.timeline 0.5b --batch 64 --length 300 [--quantization fp8]
        [--kv-cache-dtype fp8_e4m3]

With dependent launches, a kernel can begin while the previous kernel still runs. The time that a
kernel adds to the step is therefore counted from the end of the previous kernel to its own end. The
profiler makes a step a few microseconds longer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.h200.engine_in_process import add, engine
from headrace.bench.environment import describe_environment, write_json
from headrace.bench.shapes import SHAPES, write_shape
from runtime.models.quantization.registry import as_override

STEPS = 12
LAST_KERNEL = "_decode_outputs_kernel"


def record(
    shape: str, batch: int, length: int, quantization: str | None, kv_cache_dtype: str
) -> list[dict[str, Any]]:
    """Return the kernels and copies of one step, with their times in microseconds.

    The step begins at the end of the previous step.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(shape, Path(folder) / "model")
        words = model / "config.json"
        words.write_text(json.dumps(json.loads(words.read_text()) | as_override(quantization)))
        ours = engine(model, max_total_tokens=400_000, kv_cache_dtype=kv_cache_dtype)
        rng = np.random.default_rng(0)
        vocab_size = SHAPES[shape]["vocab_size"]
        add(ours, 1, [rng.integers(1, vocab_size, length) for _ in range(batch)], 400)
        while int(ours.scheduler._table.is_decoding.sum()) != batch:
            ours.scheduler.step()
        for _ in range(50):
            ours.scheduler.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(STEPS):
                ours.scheduler.step()
            torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    ends = [i for i, event in enumerate(events) if event.name == LAST_KERNEL]
    first, last = ends[STEPS // 2], ends[STEPS // 2 + 1]
    begin = events[first].time_range.end
    return [
        {
            "name": event.name[:60],
            "start_us": event.time_range.start - begin,
            "end_us": event.time_range.end - begin,
        }
        for event in events[first + 1 : last + 1]
    ]


def added(kernels: list[dict[str, Any]]) -> Counter[str]:
    """Return the microseconds that each kind of kernel adds to the step.

    Idle time is counted under the name `(nothing)`.
    """
    times: Counter[str] = Counter()
    until = 0.0
    for each in kernels:
        times["(nothing)"] += max(0.0, each["start_us"] - until)
        times[each["name"]] += max(0.0, each["end_us"] - max(until, each["start_us"]))
        until = max(until, each["end_us"])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=300, help="tokens of each prompt")
    parser.add_argument("--quantization", help="as the server's option")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as the server's option")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kernels = record(
        *(options.shape, options.batch, options.length),
        *(options.quantization, options.kv_cache_dtype),
    )
    for each in kernels:
        print(f"{each['start_us']:9.1f} {each['end_us']:9.1f} {each['name']}")
    times = added(kernels)
    print(*(f"{us:9.1f} {name}" for name, us in times.most_common()), sep="\n")
    if options.json:
        result = {"batch": options.batch, "length": options.length, "added_us": times}
        environment = {"environment": describe_environment()}
        write_json(options.json, environment | result | {"kernels": kernels})


if __name__ == "__main__":
    main()
