"""Sums of a decode step over 2 and 4 GPUs: one shot through shared memory beside NCCL.

    python -m benchmarks.h200.all_reduce [--ranks 2 4] [--json FILE]

Checks that every rank ends with the same bits, near the exact sum. A time is that of one sum in a
CUDA graph of 64, as many as a step of the 8B shape has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.h200.timing import graph_us, relative_error
from runtime.distributed.group import TensorGroup
from runtime.distributed.one_shot import OneShotAllReduce

NUM_SUMS = 64
WIDTHS = (896, 4096)
NUM_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# More than the engine gives it, to see where NCCL is faster.
MAX_BYTES = max(NUM_TOKENS) * max(WIDTHS) * 2


def check(group: TensorGroup, one_shot: OneShotAllReduce, part: Tensor) -> tuple[bool, float]:
    """Whether all ranks' sums are the same bits, and how far rank 0's is from the exact one."""
    total = one_shot(part)
    totals = [torch.empty_like(total) for _ in range(group.size)]
    dist.all_gather(totals, total)
    parts = [torch.empty_like(part) for _ in range(group.size)]
    dist.all_gather(parts, part)
    exact = torch.stack(parts).double().sum(0)
    return all(torch.equal(total, each) for each in totals), relative_error(totals[0], exact)


def rank_main(rank: int, size: int, store: Path) -> None:
    """Measure as one of `size` ranks; rank 0 prints its rows as a line of JSON."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = TensorGroup(rank, size, device, store)
    one_shot = OneShotAllReduce(device, MAX_BYTES)
    rows = []
    for width in WIDTHS:
        for num_tokens in NUM_TOKENS:
            torch.manual_seed(rank)
            part = torch.randn(num_tokens, width, device=device).bfloat16()
            row: dict[str, Any] = {"ranks": size, "tokens": num_tokens, "width": width}
            row["nccl_us"] = graph_us([lambda part=part: dist.all_reduce(part)] * NUM_SUMS)
            if one_shot.takes(part):
                part = torch.randn(num_tokens, width, device=device).bfloat16()
                row["same_bits"], row["error"] = check(group, one_shot, part)
                row["one_shot_us"] = graph_us([lambda part=part: one_shot(part)] * NUM_SUMS)
            rows.append(row)
    if rank == 0:
        print(json.dumps(rows), flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)


def measure(size: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.h200.all_reduce", "--rank"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), f"{folder}/store"],
                stdout=subprocess.PIPE if rank == 0 else None,
            )
            for rank in range(size)
        ]
        output, _ = ranks[0].communicate()
        if any(process.wait() for process in ranks):
            raise SystemExit(f"a rank of {size} failed")
    rows: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank, size, store = options.rank
        rank_main(int(rank), int(size), Path(store))
    rows = [row for size in options.ranks for row in measure(size)]
    for row in rows:
        shown = {key: round(value, 4) for key, value in row.items()}
        print(" ".join(f"{key}={value}" for key, value in shown.items()))
    if options.json:
        report = {"device": torch.cuda.get_device_name(), "rows": rows}
        options.json.write_text(json.dumps(report, indent=1))
    if not all(row.get("same_bits", True) for row in rows):
        raise SystemExit("ranks end with different bits")


if __name__ == "__main__":
    main()
