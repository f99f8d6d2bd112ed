"""Times a mixture of experts on a CPU: our engine and `transformers` generate, in one run.

    python -m benchmarks.moe_cpu [--dtype bfloat16 float32] [--batch 1 8] [--json out.json]

Both sides get random weights of Qwen1.5-MoE-A2.7B's shape, with only a few layers. The method is
that of `benchmarks.cpu_engine`. `transformers` has several ways to compute experts (`--experts`).
Our engine is compared with the fastest of those that were measured; at every batch this has been
the default, `grouped_mm`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cpu_engine import SERVER_OPTIONS, Ours, Transformers, pair
from headrace.bench.engine_target import EngineTarget, engine_config, running_engine
from headrace.bench.environment import describe_environment, write_json
from headrace.bench.shapes import write_shape

SHAPE = "moe-4"
# The weights of both sides are in memory at the same time; this many layers fit into 24 GB in
# float32.
MOST_LAYERS = {"bfloat16": 4, "float32": 2}
EXPERTS = ("grouped_mm", "batched_mm", "eager")


async def measure(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of one dtype."""
    layers = min(options.layers, MOST_LAYERS[dtype])
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = write_shape(SHAPE, Path(name) / SHAPE)
        config_file = folder / "config.json"
        config = json.loads(config_file.read_text())
        config_file.write_text(json.dumps({**config, "num_hidden_layers": layers}))
        model = ["--model-path", str(folder), "--load-format", "dummy"]
        others = ["--num-threads", str(options.threads), "--dtype", dtype]
        others += ["--max-total-tokens", "8192", "--max-running-requests", "16"]
        with engine_config(None, [*model, *SERVER_OPTIONS, *others]) as made:
            async with running_engine(made) as engine:
                return {"dtype": dtype, "layers": layers} | await compare(
                    dtype, engine, folder, options
                )


async def compare(
    dtype: str, engine: EngineTarget, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Time both sides in turns: ours on `engine`, and `transformers` on the model in `folder`."""
    ours = Ours(engine)
    result: dict[str, Any] = {}
    theirs = None if options.ours_only else Transformers(folder, options.threads, dtype)
    for batch in options.batch:
        mine: list[float] = []
        other: dict[str, list[float]] = {way: [] for way in options.experts}
        for _ in range(options.repeat):
            mine.append(await ours.decode(batch, options.tokens))
            if theirs is not None:
                for way, found in other.items():
                    theirs.model.set_experts_implementation(way)
                    found.append(await theirs.decode(batch, options.tokens))
        result[f"decode_b{batch}"] = pair(
            mine, [each for way in other.values() for each in way], "transformers"
        )
        if theirs is not None:
            result[f"decode_b{batch}"] |= {way: round(max(x), 1) for way, x in other.items()}
    result["worker_rss_gb"] = round(engine.memory_mb()["scheduler"] / 1024, 2)
    return result


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", choices=MOST_LAYERS, default=list(MOST_LAYERS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--experts", nargs="+", choices=EXPERTS, default=EXPERTS[:1])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [asyncio.run(measure(dtype, options)) for dtype in options.dtype]
    for result in results:
        print(f"\n{result['dtype']}, {result['layers']} layers, {result['worker_rss_gb']} GB")
        for name, value in result.items():
            if isinstance(value, dict):
                print(f"  {name:14}" + "".join(f"  {k} {v:>7}" for k, v in value.items()))
    if options.json:
        write_json(options.json, {"machine": describe_environment(), "results": results})


if __name__ == "__main__":
    main()
