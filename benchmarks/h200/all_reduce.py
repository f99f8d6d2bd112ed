"""Times the all-reduces of a decode step over several GPUs: one-shot kernel and NCCL.

    python -m benchmarks.h200.all_reduce [--ranks 2 4] [--check] [--json FILE]

The one-shot kernel sums through memory that the GPUs share. First, thousands of sums are checked:
their sizes alternate, some ranks come late, and each sum must be exact to the bit on every rank.
Then sums are timed in a CUDA graph of 64 sums, which is the number in a step of the 8B shape.
`--check` omits the timing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.h200.timing import graph_us
from headrace.bench.environment import describe_environment, write_json
from kernels.linear.triton import TritonLinear
from runtime.distributed.group import OneShotAllReduce, TensorGroup

NUM_SUMS = 64
WIDTHS = (896, 4096)
NUM_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Larger than the engine's sums, to see where NCCL is faster.
MAX_BYTES = max(NUM_TOKENS) * max(WIDTHS) * 2
CHECKED = ((1, 896), (1, 4096), (64, 4096), (256, 4096), (1024, 4096))
REPLAYS = 300
# The numbers of clock cycles by which a rank comes late. The small ones are microseconds, as in an
# ordinary step; the largest is about a millisecond, as after a late launch by the host.
LATE = (3000, 6000, 2_000_000)
# Input width of the products whose parts are summed.
IN_FEATURES = 512


def num_wrong(group: TensorGroup, one_shot: OneShotAllReduce) -> dict[str, int]:
    """Return, for each shape, the number of wrong elements over all sums.

    All shapes use the same shared memory in turn. The same matrix products as in the engine write
    the parts that are summed.
    """
    device = torch.device("cuda", group.rank)
    generator = torch.Generator(device).manual_seed(group.rank)

    def signs(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, device=device, generator=generator).bfloat16()

    layers = {width: TritonLinear(signs(width, IN_FEATURES), None) for width in WIDTHS}
    names = [f"{num_tokens} x {width}" for num_tokens, width in CHECKED]
    wrong = {name: torch.zeros((), dtype=torch.int64, device=device) for name in names}
    turns: list[Callable[[], None]] = []
    for i in range(NUM_SUMS):
        name, (num_tokens, width) = names[i % len(names)], CHECKED[i % len(names)]
        layer, x = layers[width], signs(num_tokens, IN_FEATURES)
        # Whole numbers: bfloat16 represents them and their sums exactly, in any order.
        part = (x.float() @ layer.weight.float().T).bfloat16()
        parts = [torch.empty_like(part) for _ in range(group.size)]
        dist.all_gather(parts, part)
        total = torch.stack(parts).float().sum(0)
        assert total.abs().max() <= 256
        place = one_shot.place(part.shape, part.dtype)
        assert place is not None
        late = LATE[i // 3 % len(LATE)] if (i + group.rank) % 3 == 0 else 0
        turns.append(partial(_turn, one_shot, layer, x, place, total.bfloat16(), late, wrong[name]))

    def work() -> None:
        for turn in turns:
            turn()

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    for _ in range(REPLAYS):
        graph.replay()
    return {name: int(count) for name, count in wrong.items()}


def _turn(
    one_shot: OneShotAllReduce,
    layer: TritonLinear,
    x: Tensor,
    place: Tensor,
    expected: Tensor,
    late: int,
    wrong: Tensor,
) -> None:
    if late:
        torch.cuda._sleep(late)
    layer.write(x, place)
    wrong.add_((one_shot(place) != expected).sum())


def measure(group: TensorGroup, one_shot: OneShotAllReduce) -> list[dict[str, Any]]:
    rows = []
    for width in WIDTHS:
        for num_tokens in NUM_TOKENS:
            shape = num_tokens, width
            part = torch.zeros(shape, dtype=torch.bfloat16, device=torch.device("cuda", group.rank))
            place = one_shot.place(shape, part.dtype)
            row: dict[str, Any] = {"ranks": group.size, "tokens": num_tokens, "width": width}
            row["nccl_us"] = graph_us([lambda part=part: dist.all_reduce(part)] * NUM_SUMS)
            row["one_shot_us"] = graph_us([lambda place=place: one_shot(place)] * NUM_SUMS)
            rows.append(row)
    return rows


def rank_main(rank: int, size: int, store: Path, *, only_check: bool) -> None:
    """Run as one of `size` ranks, and print the results as a line of JSON."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = TensorGroup(rank, size, device, store)
    one_shot = OneShotAllReduce.shared(device, MAX_BYTES)
    wrong = num_wrong(group, one_shot)
    rows = [] if only_check else measure(group, one_shot)
    print(json.dumps({"wrong": wrong, "rows": rows}), flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)


def run(size: int, *, only_check: bool) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Start all ranks; return the wrong elements on all ranks, and the times of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.h200.all_reduce"]
        command += ["--check"] if only_check else []
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank), str(size), f"{folder}/store"],
                stdout=subprocess.PIPE,
            )
            for rank in range(size)
        ]
        outputs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"a rank of {size} failed")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    wrong = {key: sum(each["wrong"][key] for each in found) for key in found[0]["wrong"]}
    return wrong, found[0]["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", help="default: 2 and 4, of the GPUs here")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank, size, store = options.rank
        rank_main(int(rank), int(size), Path(store), only_check=options.check)
    report: dict[str, Any] = {"sums": {}, "wrong": {}, "rows": []}
    found = torch.cuda.device_count()
    sizes = options.ranks or [size for size in (2, 4) if size <= found]
    if not sizes or max(sizes) > found:
        parser.error(f"there are {found} GPUs here")
    for size in sizes:
        wrong, rows = run(size, only_check=options.check)
        sums = NUM_SUMS * (REPLAYS + 1)
        print(f"{size} ranks, {sums} sums of {len(wrong)} sizes, elements that are wrong: {wrong}")
        report["sums"][str(size)] = sums
        report["wrong"][str(size)] = wrong
        report["rows"] += rows
        for row in rows:
            print(" ".join(f"{key}={round(value, 2)}" for key, value in row.items()), flush=True)
    if options.json:
        write_json(options.json, {"environment": describe_environment(), **report})
    if any(any(wrong.values()) for wrong in report["wrong"].values()):
        raise SystemExit("sums are wrong")


if __name__ == "__main__":
    main()
