"""The code that all benchmarks share: it parses options, runs a measurement and writes figures.

A benchmark defines its own options and its measurement. This module adds the options of an engine,
the handling of errors and Ctrl-C, the line about the machine, and the results file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.bench.bench_options import check_writable
from headrace.bench.environment import (
    describe_environment,
    environment_line,
    options_of,
    write_json,
)
from headrace.bench.shapes import SHAPES
from runtime.errors import HeadraceError
from runtime.ipc.standard_error import drain_standard_error

_ENGINE_OPTIONS = (
    "Every option of `headrace serve` may be given too, such as --model-path, --load-format dummy, "
    "--device, --chunked-prefill-size; without a model the demo model is measured."
)


class Run:
    """One run of a benchmark, and the output of its figures.

    Attributes:
        options: the benchmark's own options.
        server_options: the remaining arguments, which are options of the engine that the benchmark
            starts.
    """

    def __init__(
        self, benchmark: str, options: argparse.Namespace, server_options: Sequence[str]
    ) -> None:
        """Store the options; nothing is printed or written yet."""
        self.options = options
        self.server_options = server_options
        self._benchmark = benchmark
        self._is_silent = True

    @cached_property
    def _environment(self) -> dict[str, Any]:
        return describe_environment()

    def say(self, *lines: str) -> None:
        """Print lines of figures; before the first ones, print the line about the machine."""
        if self._is_silent:
            self._is_silent = False
            print(environment_line(self._environment))
        print("\n".join(lines), flush=True)

    def write(self, result: Mapping[str, Any], **details: Any) -> None:
        """Write the figures and their details to `--output-file`, if it is given."""
        if self.options.output_file is None:
            return
        content = {
            "benchmark": self._benchmark,
            "environment": self._environment,
            "options": options_of(self.options),
            "server_options": list(self.server_options),
            "result": dict(result),
        }
        write_json(self.options.output_file, {**content, **details})


@dataclass(frozen=True)
class Benchmark:
    """The definition of a benchmark.

    Attributes:
        name: the word after `headrace bench`.
        description: the text of its `--help`.
        add_options: function that adds the benchmark's own options to a parser.
        measure: function that measures, prints the figures and returns the exit status.
        starts_engine: whether the benchmark starts an engine; then it takes the options of
            `headrace serve` too.
    """

    name: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[Run], int]
    starts_engine: bool = True

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of the benchmark's options, without the options of the server."""
        parser = argparse.ArgumentParser(
            prog=f"headrace bench {self.name}",
            description=self.description,
            epilog=_ENGINE_OPTIONS if self.starts_engine else None,
            # Abbreviations are off, because an abbreviation here may be an option of the server.
            allow_abbrev=not self.starts_engine,
        )
        if self.starts_engine:
            parser.add_argument(
                "--shape",
                choices=list(SHAPES),
                help="measure random weights of this shape instead of a model",
            )
        parser.add_argument(
            "--output-file", type=Path, help="write the figures and all details as JSON"
        )
        self.add_options(parser)
        return parser

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the benchmark and return the exit status.

        It is the status that `measure` returned, 1 after an error, and 130 after Ctrl-C.
        """
        parser = self.parser()
        options, server_options = parser.parse_known_args(argv)
        if server_options and not self.starts_engine:
            parser.error(f"unrecognized arguments: {' '.join(server_options)}")
        try:
            check_writable("--output-file", options.output_file)
            return self.measure(Run(self.name, options, server_options))
        except HeadraceError as error:
            print(f"headrace bench: {error.message}", file=sys.stderr, flush=True)
            drain_standard_error()
            return 1
        except KeyboardInterrupt:
            return 130
