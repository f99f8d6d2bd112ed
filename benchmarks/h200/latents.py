"""Times latent attention (MLA) on an H200: decode steps and prompts, with their memory bound.

    python -m benchmarks.h200.latents [--batch 1 8 64] [--context 1024 4096] [--heads 16] [--tune]
        [--json FILE]

A call is one layer's attention over the KV cache at DeepSeek-V2-Lite's shape: a cached row is a
latent of 512 elements and 64 rotated elements. The times are microseconds from CUDA graphs. The
bound is the time that memory needs for all rows once, at the rate of a large copy. `--tune` also
times other tiles; those of five numbers are for `kernels.latent_attention.triton`, those of four
for `kernels.latent_attention.hopper`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200.timing import graph_us, relative_error
from benchmarks.h200.weight_forms import copy_rate
from headrace.bench.environment import describe_environment, write_json
from kernels.latent_attention.hopper import TILES, DecodeTile
from kernels.latent_attention.reference import latent_attention as reference
from kernels.latent_attention.triton import DECODE, EXTEND, LatentTile, latent_attention

DEVICE = torch.device("cuda")
RANK, ROPE, PAGE_SIZE = 512, 64, 16
# More bytes than the L2 cache holds.
POOL_BYTES = 200_000_000
Tile = LatentTile | DecodeTile
OTHER_TILES = [
    LatentTile(1, keys, warps, stages, waves)
    for keys, warps, stages, waves in itertools.product((32, 64), (4, 8), (1, 2, 3, 4), (1, 2, 4))
]
HOPPER_TILES = [
    *TILES,
    DecodeTile(16, 4, 1, 1),
    DecodeTile(16, 4, 2, 1),
    DecodeTile(16, 8, 1, 2),
    DecodeTile(16, 8, 2, 1),
]
OTHER_PROMPT_TILES = [
    LatentTile(tokens, keys, warps, stages, 1)
    for tokens, keys, warps, stages in itertools.product((2, 4), (32, 64), (4, 8), (1, 2, 3))
]


class Step:
    """One step's inputs: sequences whose pages are in random order.

    There are several KV caches, used in turn, so that none stays in the L2 cache.
    """

    def __init__(
        self, batch: int, context: int, num_new: int, heads: int, shortest: int | None = None
    ) -> None:
        """Make sequences of `context` tokens, or of random lengths from `shortest` to `context`."""
        pages = -(-context // PAGE_SIZE)
        row_bytes = batch * pages * PAGE_SIZE * (RANK + ROPE) * 2
        many = max(2, min(8, POOL_BYTES // row_bytes))
        shape = batch * pages + 1, 1, PAGE_SIZE, RANK + ROPE
        self.pools = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(many)]
        self.q = torch.randn(
            batch * num_new, heads, RANK + ROPE, device=DEVICE, dtype=torch.bfloat16
        )
        order = torch.randperm(batch * pages, device=DEVICE) + 1
        self.table = order.view(batch, pages).to(torch.int32)
        low = context if shortest is None else shortest
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(low, context + 1, (batch,), generator=generator)
        self.lengths = lengths.to(DEVICE, torch.int32)
        self.indptr = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * num_new
        self.num_decodes = batch if num_new == 1 else 0
        self.bytes = int(lengths.sum()) * (RANK + ROPE) * 2

    def run(self, index: int, tile: Tile | None = None) -> Tensor:
        """Run the attention over one of the KV caches."""
        pool = self.pools[index % len(self.pools)]
        rest = self.table, self.lengths, self.indptr, self.num_decodes, 0.1, RANK
        return latent_attention(self.q, pool, *rest, tile=tile)

    def us(self, tile: Tile | None = None) -> float:
        """Return the microseconds of one call."""
        return graph_us([partial(self.run, index, tile) for index in range(len(self.pools))])

    def error(self) -> float:
        """Return the relative deviation of the output from the reference."""
        rest = self.table, self.lengths, self.indptr, self.num_decodes, 0.1, RANK
        return relative_error(self.run(0), reference(self.q, self.pools[0], *rest))


def measure(step: Step, name: str, rate: float, tiles: Sequence[Tile]) -> dict[str, Any]:
    """Time one step and print the result; if `tiles` are given, time each of them too."""
    bound, us = step.bytes / rate, step.us()
    row: dict[str, Any] = {"step": name, "us": us, "bound_us": bound, "error": step.error()}
    print(
        f"{name}: {us:.1f} us, {bound / us:.0%} of the bound; off by {row['error']:.1e}", flush=True
    )
    found: list[tuple[float, Tile]] = []
    for tile in tiles:
        try:
            found.append((step.us(tile), tile))
        except Exception as error:  # too much shared memory
            print(f"  {tuple(tile)}: {type(error).__name__}")
    found.sort()
    for took, tile in found[:4]:
        print(f"  {took:.1f} us {bound / took:.0%} {tuple(tile)}", flush=True)
    row["tiles"] = [[took, *tile] for took, tile in found]
    return row


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Bytes a microsecond.
    rate, rows = copy_rate(), []
    print(f"{rate / 1e6:.2f} TB/s; {TILES}; {DECODE}; {EXTEND}")
    for batch, context in itertools.product(options.batch, options.context):
        is_tuned = options.tune and batch == max(options.batch)
        tiles = [*HOPPER_TILES, *OTHER_TILES] if is_tuned else []
        step = Step(batch, context, 1, options.heads)
        rows.append(measure(step, f"decode {batch} x {context}", rate, tiles))
    for batch in options.batch:
        step = Step(batch, 8192, 1, options.heads, shortest=200)
        rows.append(measure(step, f"decode {batch} x 200 to 8192", rate, []))
    prompt = Step(1, 4096, 2048, options.heads)
    prompt_tiles = OTHER_PROMPT_TILES if options.tune else []
    rows.append(measure(prompt, "2048 tokens of a prompt of 4096", rate, prompt_tiles))
    if options.json is not None:
        write_json(options.json, {"environment": describe_environment(), "rows": rows})


if __name__ == "__main__":
    main()
