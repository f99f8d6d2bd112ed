"""Cases A to F on one machine, ours or any server behind a URL.

    python -m benchmarks.h200.run A B C D E F --shape 8b 0.5b --out results
    python -m benchmarks.h200.run A F --url http://127.0.0.1:8000 --backend openai-completions

Without `--url`, A to E start the engine's processes with random weights and use no HTTP, and F
starts `python -m server.launch`. What is no option here is given to the engine, for example
`--chunked-prefill-size 8192`. A case prints one line; all of a shape go to `<out>/<shape>.json`,
which is renewed after each case.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.h200.cases import FULL, SMOKE, Cases, Sizes, line, scaled
from runtime.errors import HeadraceError
from server.bench.engine import engine_config, running_engine
from server.bench.environment import describe_environment, environment_line, options_of, write_json
from server.bench.shapes import SHAPES

OFFLINE = "ABCDE"


class Results:
    """What was measured of one shape, written after every case."""

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


async def run_offline(cases: Sequence[str], results: Results, server: Sequence[str]) -> None:
    """A to E in processes of our own."""
    with engine_config(results.name, server) as config:
        async with running_engine(config) as engine:
            results.add("start", {"ready_s": engine.start_s, **engine.memory_mb()})
            for case in cases:
                # Only A needs the tokens as they come; the peers' offline figures do not either.
                engine.stream = case == "A"
                await run_case(case, Cases(engine, engine.vocab_size, results.sizes), results)


async def run_case(case: str, cases: Cases, results: Results) -> None:
    """Measure one case; its failure is its result, and the others go on."""
    try:
        results.add(case, await cases.run(case))
    except HeadraceError as error:
        results.add(case, {"error": str(error)})
        print(f"{results.name} {case}: {error}", file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    """The options of this script; the engine's are passed on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", choices=list("ABCDEF"))
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["8b", "0.5b"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    parser.add_argument("--repeat", type=int, help="counted runs of a case (3); the median counts")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that all works")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; 1 when one of them could not."""
    options, server = build_parser().parse_known_args(argv)
    sizes = scaled(SMOKE if options.smoke else FULL, repeat=options.repeat)
    print(environment_line(describe_environment()), flush=True)
    offline = [case for case in options.cases if case in OFFLINE]
    for shape in options.shape:
        results = Results(shape, sizes, options, server)
        try:
            if offline:
                uvloop.run(run_offline(offline, results, server))
        except HeadraceError as error:
            print(f"{shape}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
