"""Measures what a second node costs: cases A to D on two GPUs of one host, over HTTP.

    python -m benchmarks.h200.nodes --out DIR [--shape 8b] [--repeat 2] [--ways one nccl two]

Each way is a server with random weights, measured in turn by `benchmarks.h200.cases`:

- `one`: `--tp-size 2`;
- `nccl`: the same, with NCCL in place of the faster sum of GPUs that share memory;
- `two`: `--tp-size 2` as two "nodes", each with one of the GPUs, which connect over a loopback
  address;
- `stages`: `--pp-size 2`, one node;
- `two-stages`: `--pp-size 2` as two "nodes".

Before the cases, each server answers the same greedy prompts, and the tokens that agree with those
of the first way are counted. With random weights many tokens are almost equally likely. If two ways
round their sums differently, their outputs therefore differ after some tokens. Two ways that sum by
the same library round alike. Each stage draws random weights of its own, so the servers with stages
answer with other tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import uvloop

from benchmarks.h200.cases import FULL, SMOKE, scaled
from benchmarks.h200.run import Results, make_job, run_served
from benchmarks.h200.server_process import free_port, running_server
from headrace.bench.shapes import SHAPES, write_shape
from headrace.http_stream import HttpClient
from runtime.errors import HeadraceError

WAYS: dict[str, tuple[str, ...]] = {
    "one": ("--tp-size", "2"),
    "nccl": ("--tp-size", "2", "--disable-custom-all-reduce"),
    "two": ("--tp-size", "2", "--nnodes", "2"),
    "stages": ("--pp-size", "2"),
    "two-stages": ("--pp-size", "2", "--nnodes", "2"),
}
CASES = "ABCD"
_NUM_PROMPTS, _PROMPT_LEN, _NUM_TOKENS = 8, 200, 64


@asynccontextmanager
async def second_node(shape: str, options: list[str]) -> AsyncIterator[None]:
    """Run node 1 on the second GPU, and end it afterwards."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "server.launch", "--node-rank", "1"),
        *("--model-path", shape, "--load-format", "dummy", "--log-level", "warning", *options),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"},
    )
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def started(way: str, shape: str, more: list[str]) -> AsyncIterator[str]:
    """Start a server in one of the `WAYS`, and yield its URL."""
    # Without a seed, each start draws other random weights.
    options = [*WAYS[way], "--random-seed", "0", *more]
    if "--nnodes" not in options:
        async with running_server(shape, options) as server:
            yield server.url
        return
    options += ["--dist-init-addr", f"127.0.0.2:{free_port()}"]
    with tempfile.TemporaryDirectory(prefix="bench-node-") as folder:
        model = str(write_shape(shape, Path(folder) / shape))
        async with (
            second_node(model, options),
            running_server(shape, options, {"CUDA_VISIBLE_DEVICES": "0"}) as server,
        ):
            yield server.url


async def greedy_tokens(url: str, vocab_size: int) -> list[list[int]]:
    """Return the greedy tokens of fixed prompts."""
    draw = random.Random(7)
    body = {
        "input_ids": [
            [draw.randrange(3, vocab_size) for _ in range(_PROMPT_LEN)] for _ in range(_NUM_PROMPTS)
        ],
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": _NUM_TOKENS,
            "ignore_eos": True,
        },
    }
    client = HttpClient(url, {}, timeout_s=120.0)
    _, answer = await client.call("POST", "/generate", orjson.dumps(body))
    client.close()
    return [one["output_ids"] for one in orjson.loads(answer)]


def agreeing(tokens: list[list[int]], others: list[list[int]]) -> int:
    """Return how many tokens agree before the first one that differs, over all prompts."""
    return sum(
        next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(tokens, others, strict=True)
    )


async def run_way(
    way: str, first: list[list[int]] | None, args: argparse.Namespace, more: list[str]
) -> list[list[int]]:
    """Measure one way; return its greedy tokens."""
    sizes = scaled(SMOKE if args.smoke else FULL, repeat=args.repeat)
    results = Results(f"nodes-{way}", sizes, args, [*WAYS[way], *more])
    vocab_size = SHAPES[args.shape]["vocab_size"]
    async with started(way, args.shape, more) as url:
        tokens = await greedy_tokens(url, vocab_size)
        agree = {"agreeing_tokens": agreeing(tokens, first or tokens)}
        results.add("tokens", {**agree, "tokens": _NUM_PROMPTS * _NUM_TOKENS})
        await run_served(args.cases, results, vocab_size, make_job(url, "headrace", ""))
    return tokens


def main() -> int:
    """Measure the ways one after the other; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that all works")
    args, more = parser.parse_known_args()
    first = None
    failed = 0
    for way in args.ways:
        try:
            tokens = uvloop.run(run_way(way, first, args, more))
        except (HeadraceError, OSError) as error:
            print(f"{way}: {error}", file=sys.stderr, flush=True)
            failed = 1
        else:
            first = first or tokens
    return failed


if __name__ == "__main__":
    sys.exit(main())
