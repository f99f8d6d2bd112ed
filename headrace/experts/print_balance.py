"""`headrace experts FILE` prints the balance of each layer, and draws it on request."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.experts.balance import Balance, UnreadableFile, balances, counts_file, read_counts
from headrace.experts.heat_map import heat_map


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of `headrace experts`."""
    parser = argparse.ArgumentParser(
        prog="headrace experts",
        description="Report how evenly experts were used, from a file that "
        "/dump_expert_distribution_record wrote.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the .csv, or the .pt beside it")
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="draw a heat map: a row for each layer, a column for each expert",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `headrace experts`: print the table, and write a picture if one is requested.

    Returns:
        The exit status: 0, or 2 if a file cannot be read or written.
    """
    options = build_parser().parse_args(argv)
    try:
        counts = read_counts(counts_file(options.file))
    except UnreadableFile as error:
        return _fail(str(error))
    found = balances(counts)
    sys.stdout.write("".join(f"{line}\n" for line in table(found)))
    if options.png is not None:
        try:
            options.png.write_bytes(heat_map(counts))
        except OSError as error:
            return _fail(f"{options.png} cannot be written: {error.strerror}.")
        sys.stdout.write(f"Heat map: {options.png}\n")
    return 0


def table(found: list[Balance]) -> list[str]:
    """Format balances as lines: a header, one line per layer, and a summary of all layers."""
    if not found:
        return ["No expert was chosen."]
    lines = [f"{'layer':>5} {'tokens':>10} {'max/mean':>8} {'entropy':>7} {'unused':>6}  top"]
    for each in found:
        top = " ".join(f"{expert}:{share:.1%}" for expert, share in each.top)
        lines.append(
            f"{each.layer:>5} {each.num_choices:>10} {each.max_to_mean:>8.2f} "
            f"{each.entropy:>7.3f} {each.unused:>6.1%}  {top}"
        )
    worst = max(found, key=lambda each: each.max_to_mean)
    mean = sum(each.max_to_mean for each in found) / len(found)
    lines.append(
        f"{len(found)} layers: max/mean {mean:.2f} on average, {worst.max_to_mean:.2f} at most "
        f"(layer {worst.layer})"
    )
    return lines


def _fail(message: str) -> int:
    sys.stderr.write(f"headrace experts: {message}\n")
    return 2
