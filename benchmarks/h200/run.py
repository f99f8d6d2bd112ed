"""Runs cases A to F on one GPU, against our engine or against any server with a URL.

    python -m benchmarks.h200.run A B C D E F --shape 8b 0.5b --out results
    python -m benchmarks.h200.run A F --shape 8b --url http://127.0.0.1:8000 \
        --backend openai --name vllm-8b

Without `--url`, A to E start the engine's processes with random weights and use no HTTP, and F
starts `python -m server.launch`. With `--url`, every case goes over HTTP. Options that this script
does not know are passed to the engine, for example `--chunked-prefill-size 8192`. Each case prints
one line. The results of a shape go to `<out>/<shape>.json`, which is written again after each case.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.h200.cases import FULL, SMOKE, Cases, Sizes, line, scaled
from benchmarks.h200.server_process import running_server
from headrace.bench.backends import BACKENDS, Wire, first_model
from headrace.bench.clients import ClientJob, make_target
from headrace.bench.engine_target import engine_config, running_engine
from headrace.bench.environment import (
    describe_environment,
    environment_line,
    options_of,
    write_json,
)
from headrace.bench.shapes import SHAPES
from runtime.errors import HeadraceError

OFFLINE = "ABCDE"


class Results:
    """The results of one shape, written to a file after every case."""

    def __init__(
        self, name: str, sizes: Sizes, options: argparse.Namespace, server_options: Sequence[str]
    ) -> None:
        self.name = name
        self.sizes = sizes
        self.path: Path = options.out / f"{name}.json"
        self.content: dict[str, Any] = {
            "environment": describe_environment(),
            "options": options_of(options),
            "sizes": dataclasses.asdict(sizes),
            "server_options": list(server_options),
            "cases": {},
        }

    def add(self, case: str, result: dict[str, Any]) -> None:
        self.content["cases"][case] = result
        print(f"{self.name} {line(case, result)}", flush=True)
        write_json(self.path, self.content)


async def run_offline(
    shape: str, cases: Sequence[str], results: Results, server: Sequence[str]
) -> None:
    """Run cases A to E in the engine's own processes, without HTTP."""
    with engine_config(shape, server) as config:
        async with running_engine(config) as engine:
            results.add("start", {"ready_s": engine.start_s, **engine.memory_mb()})
            for case in cases:
                # Only A needs tokens as they are generated. The peers' offline figures are also for
                # whole answers.
                engine.stream = case == "A"
                await run_case(case, Cases(engine, engine.vocab_size, results.sizes), results)


async def run_served(
    cases: Sequence[str], results: Results, vocab_size: int, job: ClientJob
) -> None:
    """Run the cases over HTTP, against a running server."""
    target = make_target(job)
    if job.backend.startswith("openai") and not job.wire.model:
        wire = Wire(await first_model(target.client))
        target = make_target(msgspec.structs.replace(job, wire=wire))
    for case in cases:
        await run_case(case, Cases(target, vocab_size, results.sizes), results)


async def run_case(case: str, cases: Cases, results: Results) -> None:
    """Measure one case; if it fails, record the error, so that the other cases go on."""
    try:
        results.add(case, await cases.run(case))
    except HeadraceError as error:
        results.add(case, {"error": str(error)})
        print(f"{results.name} {case}: {error}", file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this script's options; other options go to the engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", choices=list("ABCDEF"))
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["8b", "0.5b"])
    parser.add_argument("--url", help="measure this server over HTTP instead of our engine")
    parser.add_argument("--backend", choices=list(BACKENDS), default="headrace")
    parser.add_argument("--model", help="name sent to OpenAI's routes; the first listed if absent")
    parser.add_argument("--name", help="of the result; the shape's when absent")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    parser.add_argument("--repeat", type=int, help="counted runs of a case (3); the median counts")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that all works")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if the engine or the server cannot be started."""
    options, server = build_parser().parse_known_args(argv)
    sizes = scaled(SMOKE if options.smoke else FULL, repeat=options.repeat)
    print(environment_line(describe_environment()), flush=True)
    for shape in options.shape:
        results = Results(options.name or shape, sizes, options, server)
        try:
            uvloop.run(run_shape(shape, results, options, server))
        except (HeadraceError, OSError) as error:
            print(f"{shape}: {error}", file=sys.stderr)
            return 1
    return 0


async def run_shape(
    shape: str, results: Results, options: argparse.Namespace, server: Sequence[str]
) -> None:
    """Run all cases of one shape, in process or over HTTP."""
    vocab_size = SHAPES[shape]["vocab_size"]
    if options.url:
        job = make_job(options.url, options.backend, options.model or "")
        await run_served(options.cases, results, vocab_size, job)
        return
    offline = [case for case in options.cases if case in OFFLINE]
    if offline:
        await run_offline(shape, offline, results, server)
    if "F" in options.cases:
        async with running_server(shape, server) as running:
            results.add("start-server", {"ready_s": running.ready_s})
            job = make_job(running.url, "headrace", "")
            await run_served(["F"], results, vocab_size, job)


def make_job(url: str, backend: str, model: str) -> ClientJob:
    """Return the client's settings for a server."""
    return ClientJob(url=url, backend=backend, wire=Wire(model), timeout_s=600.0)


if __name__ == "__main__":
    sys.exit(main())
