"""Parses the options of `headrace doctor` and of the server, and prints the report."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.doctor.examine import examine
from headrace.doctor.text import to_text
from runtime.launch.command_line import parse_args

PROG = "headrace doctor"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the doctor's own options, without the options of the server."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Report what this machine offers, and what a model needs: weights, KV pool, "
        "longest context, concurrent requests. The numbers come from config.json, or from a GGUF "
        "file's header, alone. The exit status is 1 when something prevents a start.",
        usage=f"{PROG} [MODEL] [-h] [--config FILE] [--json] [options of headrace serve]",
        epilog="Every option of `headrace serve` may be given too, such as --model-path, --dtype, "
        "--mem-fraction-static, --tp-size; without a model the demo model is examined.",
        # Abbreviations are off, because an abbreviation here may be an option of the server.
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a config.json in place of a model; weights are not checked",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run `headrace doctor`: print the report and return the exit status.

    The status is 1 if something prevents the server from starting, and otherwise 0.
    """
    if argv and not argv[0].startswith("-"):
        # The model's name is not declared as a positional argument, because the parser would then
        # also take values of the server's options for it.
        argv = ["--model-path", *argv]
    options, rest = build_parser().parse_known_args(argv)
    # Log messages are discarded, because the report contains the same facts.
    logging.getLogger().addHandler(logging.NullHandler())
    report = examine(parse_args(rest, prog=PROG).config, options.config)
    text = json.dumps(report.as_json(), indent=1) if options.json else to_text(report)
    sys.stdout.write(text + "\n")
    return 1 if report.problems else 0
