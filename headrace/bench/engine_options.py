"""Command lines of the benchmarks that start an engine: their own options, then the server's."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.bench.shapes import SHAPES


def engine_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that every such benchmark has."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="Every option of `headrace serve` may be given too, such as --model-path, "
        "--load-format dummy, --device, --chunked-prefill-size; without a model the demo model "
        "is measured.",
        # An abbreviation here could be a whole option of the server.
        allow_abbrev=False,
    )
    parser.add_argument(
        "--shape", choices=list(SHAPES), help="random weights of this shape instead of a model"
    )
    parser.add_argument("--output-file", type=Path, help="write everything as JSON")
    return parser
