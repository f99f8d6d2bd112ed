"""Times decode attention of sequences that share a prefix.

It compares reading the shared prefix once for all sequences with reading it for each.
"""

import numpy as np
import torch
from torch import Tensor

from benchmarks.h200.attention import DEVICE, PAGE, SHAPES, Step, make_step, runs
from benchmarks.h200.timing import graph_us, relative_error
from kernels.paged_attention import reference, shared_prefix
from kernels.paged_attention import triton as ours
from kernels.paged_attention.prefix_group import PrefixGroup
from kernels.paged_attention.shared_prefix import SharedPrefixes

# Each entry: number of sequences, tokens that they share, and tokens that each has alone.
CASES = (
    *((64, 4096, 80), (64, 1024, 256), (64, 256, 256), (256, 4096, 80), (256, 1024, 256)),
    *((16, 4096, 80), (16, 1024, 256), (16, 512, 128), (8, 2048, 256), (8, 16384, 256)),
)


def shared_step(shape, batch, prefix, own, num_layers) -> Step:
    """Return a step in which all sequences begin with the same pages."""
    step = make_step(shape, [(prefix + own + 7 * (i % 5), 1) for i in range(batch)], num_layers)
    step.table[:, : prefix // PAGE] = step.table[0, : prefix // PAGE].clone()
    return step


def planned(shape, step: Step, groups: list[PrefixGroup] | None):
    """Return the attention plan for the step, with or without shared-prefix groups."""
    count = len(step.lens)
    workspace = ours.AttentionWorkspace(count, count, *shape, DEVICE)
    prefixes = None
    if groups is not None:
        prefixes = SharedPrefixes(workspace)
        prefixes.put(groups)
    return ours.plan_attention(workspace, step.lens, step.indptr, count, count, prefixes=prefixes)


def group_of(count: int, length: int, first: int = 0) -> PrefixGroup:
    return PrefixGroup(np.arange(first, count), length)


def check() -> list[str]:
    """Compare the outputs with the float32 reference; return the errors."""
    wrong = []
    for name, shape in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            step = make_step(shape, [(1500 + 9 * i, 1) for i in range(40)], 1, dtype)
            step.table[3:25, :70] = step.table[3, :70].clone()
            step.table[27:, :33] = step.table[27, :33].clone()
            groups = [group_of(25, 70 * PAGE, 3), group_of(40, 33 * PAGE, 27)]
            q, k, v, out = step.layers[0]
            tensors: tuple[Tensor, ...] = (q.float(), k.float(), v.float(), step.table, step.lens)
            want = reference.paged_attention(*tensors, step.indptr, shape[2] ** -0.5, -1, None)
            for several in ([], groups[:1], groups):
                (run,) = runs(shape, step, planned(shape, step, several))
                for _ in range(3):
                    out.fill_(float("nan"))
                    run()
                    error = relative_error(out, want)
                    limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
                    if not error < limit:
                        wrong.append(f"{len(several)} prefixes {name} {dtype}: {error:.2e}")
    return wrong


def measure() -> list[dict[str, object]]:
    """Time one layer of every case."""
    rows: list[dict[str, object]] = []
    for name, shape in SHAPES.items():
        for batch, prefix, own in CASES:
            step = shared_step(shape, batch, prefix, own, 4)
            each = graph_us(runs(shape, step, planned(shape, step, None)))
            once = graph_us(runs(shape, step, planned(shape, step, [group_of(batch, prefix)])))
            rows.append(
                {
                    "model": name,
                    "case": f"{batch} x ({prefix} shared + {own})",
                    "us": once,
                    "unshared_us": each,
                }
            )
    return rows


def tune() -> list[dict[str, object]]:
    """Time other tiles for the shared part."""
    rows: list[dict[str, object]] = []
    tiles = [ours.Tile(64, 4, 3), ours.Tile(64, 4, 2), ours.Tile(64, 8, 3), ours.Tile(64, 8, 2)]
    for name, shape in SHAPES.items():
        for batch, prefix, own in CASES[:7]:
            step = shared_step(shape, batch, prefix, own, 4)
            found = []
            for block_rows, programs, tile in (
                (rows_, programs_, tile_)
                for rows_ in (64, 128)
                for programs_ in (1, 2, 3, 4)
                for tile_ in tiles
            ):
                shared_prefix.BLOCK_ROWS, shared_prefix.PROGRAMS = block_rows, programs
                ours.prefix_tile = lambda *_, tile=tile: tile
                plan = planned(shape, step, [group_of(batch, prefix)])
                took = graph_us(runs(shape, step, plan), 7)
                found.append((took, block_rows, programs, *tile.__dict__.values()))
            rows.append({"model": name, "case": f"{batch} x ({prefix} shared + {own})"})
            print(name, rows[-1]["case"], *(f"{t[0]:.1f}:{t[1:]}" for t in sorted(found)[:6]))
    return rows
