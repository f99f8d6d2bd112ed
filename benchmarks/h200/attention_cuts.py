"""Times paged attention with various tile sizes, and compares them with `triton_tiles`' choice.

python3 -m benchmarks.h200.attention_cuts [--shape 8B 0.5B] [--fp8-decode] [--json FILE]

`--fp8-decode` times only decoding, with keys and values in E4M3.
"""

import argparse
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.h200 import shared_prefix
from benchmarks.h200.attention import (
    SHAPES,
    decode_seqs,
    make_step,
    planned,
    runs,
)
from benchmarks.h200.timing import graph_us, relative_error
from headrace.bench.environment import describe_environment, write_json
from kernels.paged_attention import reference, triton_plan
from kernels.paged_attention import triton as ours
from kernels.paged_attention.triton_tiles import Tile
from kernels.triton_support.compile_ahead import compiling_ahead

Seqs = list[tuple[int, int]]
EXTEND: dict[str, Seqs] = {
    **{f"1x{n}": [(n, n)] for n in (64, 256, 512, 1024, 2048, 4096)},
    **{f"{c}x{n}": [(n, n)] * c for c, n in ((64, 32), (4, 512), (16, 512), (8, 1024), (2, 4096))},
    "ragged": [(n, n) for n in (37, 900, 250, 410, 620, 77, 128)],
    "32 decodes + 1x512": [(700, 1)] * 32 + [(512, 512)],
    "1x4 on 1024": [(1028, 4)],
    "1x16 on 1024": [(1040, 16)],
    "16x4 on 1024": [(1028, 4)] * 16,
    "64x4 on 1024": [(1028, 4)] * 64,
    "64x8 on 4096": [(4104, 8)] * 64,
    "64x64 on 4096": [(4160, 64)] * 64,
    "4x512 on 2048": [(2560, 512)] * 4,
    "1x2048 on 6144": [(8192, 2048)],
}
EXTEND_CUTS = [(64, Tile(n, 4, s)) for n in (32, 64) for s in (3, 5)]
EXTEND_CUTS += [(128, Tile(n, w, s)) for n in (32, 64) for w in (4, 8) for s in (3, 5)]
EXTEND_CUTS += [(64, Tile(128, 4, 5)), (128, Tile(64, 8, 2))]
DECODE_CUTS = [Tile(n, w, s) for n, w in ((32, 4), (64, 2), (64, 4), (128, 4)) for s in (2, 5)]
PREFIX_CUTS = [Tile(n, w, s) for n, w in ((32, 4), (64, 4), (64, 8)) for s in (3, 5)]


def cut_step(shape: tuple[int, int, int], seqs: Seqs, layers: int, rows: int | None):
    """Return a step and its plan.

    A block has `rows` query rows, or the plan's own choice if `rows` is None.
    """
    step = make_step(shape, seqs, layers)
    usual = triton_plan.block_rows_of
    if rows is not None:
        triton_plan.block_rows_of = lambda *_, **__: rows
    try:
        return step, planned(shape, step)
    finally:
        triton_plan.block_rows_of = usual


def time_cut(
    shape: tuple[int, int, int], seqs: Seqs, layers: int, rows: int | None, tile: Tile | None
) -> float:
    """Return the microseconds per layer.

    The output of a small step is also compared with the reference.
    """
    step, plan = cut_step(shape, seqs, layers, rows)
    calls = runs(shape, step, plan, (tile, tile))
    calls[0]()
    q, k, v, out = step.layers[0]
    if len(q) * int(step.lens.max()) < 2**20:
        tensors = (step.table, step.lens, step.indptr, shape[2] ** -0.5, -1)
        want = reference.paged_attention(q.float(), k.float(), v.float(), *tensors, None)
        error = relative_error(out, want)
        assert error < 1e-2, f"{tile} is wrong by {error}"
    return graph_us(calls, 9)


FP8_CUTS = [Tile(n, w, s) for n, w in ((64, 2), (64, 4), (128, 4)) for s in (2, 3, 4, 5)]
FP8_SEQS: dict[str, Seqs] = {
    f"decode {count}x{kv_len}": [(kv_len, 1)] * count
    for count, kv_len in ((1, 640), (16, 640), (64, 300), (64, 560), (64, 1024), (256, 660))
}


def time_fp8_decode(shape: tuple[int, int, int]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each case of decoding with its microseconds per layer, by tile."""
    for name, seqs in FP8_SEQS.items():
        step, plan = cut_step(shape, seqs, max(2, 512 // len(seqs) // 8), None)
        kind = torch.float8_e4m3fn
        step.layers = [(q, k.to(kind), v.to(kind), out) for q, k, v, out in step.layers]
        chosen = runs(shape, step, plan)
        calls = {cut_name(None, tile): runs(shape, step, plan, (tile, tile)) for tile in FP8_CUTS}
        with compiling_ahead() as requests:
            if requests is not None:
                for each in calls.values():
                    each[0]()
        chosen[0]()
        want = step.layers[0][3].clone()
        taken = {"chosen": graph_us(chosen, 9)}
        for cut, each in calls.items():
            each[0]()
            assert relative_error(step.layers[0][3], want) < 1e-2, cut
            taken[cut] = graph_us(each, 9)
        yield name, taken


def cases(
    models: list[str],
) -> Iterator[tuple[str, str, Seqs, int, list[tuple[int | None, Tile]]]]:
    """Yield each case: model, name, sequences, number of layers, and the cuts to time."""
    for model in models:
        for name, seqs in EXTEND.items():
            layers = 8 if sum(n for _, n in seqs) <= 1024 else 2
            yield model, name, seqs, layers, list(EXTEND_CUTS)
        for name, seqs, layers in decode_seqs():
            yield model, name, seqs, layers, [(None, tile) for tile in DECODE_CUTS]


def compile_share(models: list[str], share: int, of: int) -> None:
    """Compile one share of the tiles; several processes together compile all tiles."""
    seqs = {"extend": [(512, 512)], "decode": [(512, 1)] * 4}
    todo = [
        (shape, seqs[kind], rows, tile)
        for shape in map(SHAPES.get, models)
        for kind, cuts in (("extend", EXTEND_CUTS), ("decode", [(None, t) for t in DECODE_CUTS]))
        for rows, tile in cuts
    ]
    for shape, each, rows, tile in todo[share::of]:
        step, plan = cut_step(shape, each, 1, rows)
        runs(shape, step, plan, (tile, tile))[0]()
    torch.cuda.synchronize()


def measure_fp8_decode(models: list[str], file: Path | None) -> None:
    """Print the fastest tiles of decoding with E4M3 keys, and write them to a file."""
    rows = []
    for model in models:
        for name, taken in time_fp8_decode(SHAPES[model]):
            ordered = sorted((us, cut) for cut, us in taken.items())
            rows.append({"model": model, "case": name, "cuts": ordered})
            best = ", ".join(f"{us:.1f} {cut}" for us, cut in ordered[:4])
            print(f"{model:>5} {name:<18} {taken['chosen']:8.2f}  {best}", flush=True)
    if file:
        write_json(file, {"environment": describe_environment(), "table": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--fp8-decode", action="store_true", help="only decoding, with E4M3 keys")
    args = parser.parse_args()
    if args.fp8_decode:
        measure_fp8_decode(args.shape, args.json)
        return
    processes = [
        multiprocessing.get_context("spawn").Process(target=compile_share, args=(args.shape, i, 12))
        for i in range(12)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    torch.manual_seed(1)
    table: list[dict[str, object]] = []

    def add(model: str, case: str, chosen: float, found: list[tuple[float, str]]) -> None:
        found.sort()
        table.append({"model": model, "case": case, "chosen_us": chosen, "cuts": found})
        best = ", ".join(f"{took:.1f} {cut}" for took, cut in found[:4])
        print(f"{model:>5} {case:<26} {chosen:8.2f}  {best}", flush=True)

    for model, name, seqs, layers, cuts in cases(args.shape):
        shape = SHAPES[model]
        found = [
            (time_cut(shape, seqs, layers, rows, tile), cut_name(rows, tile)) for rows, tile in cuts
        ]
        add(model, name, time_cut(shape, seqs, layers, None, None), found)
    usual = ours.prefix_tile
    for model in args.shape:
        shape = SHAPES[model]
        for batch, prefix, own in shared_prefix.CASES[:7]:
            step = shared_prefix.shared_step(shape, batch, prefix, own, 4)
            group = shared_prefix.group_of(batch, prefix)
            took = {}
            for tile in (None, *PREFIX_CUTS):
                ours.prefix_tile = usual if tile is None else lambda *_, tile=tile: tile
                plan = shared_prefix.planned(shape, step, [group])
                took[tile] = graph_us(runs(shape, step, plan), 9)
            ours.prefix_tile = usual
            name = f"{batch} x ({prefix} shared + {own})"
            chosen = took.pop(None)
            add(model, name, chosen, [(us, cut_name(None, tile)) for tile, us in took.items()])
    if args.json:
        write_json(args.json, {"environment": describe_environment(), "table": table})


def cut_name(rows: int | None, tile: Tile) -> str:
    cut = f"{tile.block_n} keys, {tile.num_warps} warps, {tile.num_stages} stages"
    return cut if rows is None else f"{rows} rows, {cut}"


if __name__ == "__main__":
    main()
