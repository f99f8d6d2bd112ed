"""`headrace warm MODEL --out DIR`: compiles a model's kernels before its first start.

The command starts an engine with the server's options and lets it answer a few requests. Kernels
that are compiled meanwhile are written to the folder: Triton's for a GPU, or the C++ library for a
CPU. The folder can be copied into a container image, or shared with machines of the same kind.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from headrace.engine.engine import Engine
from headrace.engine.engine_errors import EngineError
from headrace.engine.server_args import ServerArgs
from runtime.launch.command_line import parse_args

PROG = "headrace warm"
# Number of prompts, and tokens of each: a single prompt, a small batch, and a long prompt that
# takes several steps.
_PROMPTS = ((1, 5), (8, 40), (1, 3000))
# Sampling parameters: greedy, and with every kind of filter.
_SAMPLING = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options, without the options of the server."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Compile a model's kernels into a folder, so that its first start on another "
        "machine of this kind compiles nothing. It needs the GPU that serves; weights are not "
        "needed with --load-format dummy.",
        usage=f"{PROG} [MODEL] --out DIR [-h] [options of headrace serve]",
        epilog="Give the options of headrace serve that you serve with: they decide which kernels "
        "are used.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of compiled kernels"
    )
    return parser


def main(argv: Sequence[str], out: TextIO) -> int:
    """Run `headrace warm` and return its exit status.

    Args:
        argv: the arguments after `warm`.
        out: receives the messages for the user.
    """
    if argv and not argv[0].startswith("-"):
        argv = ["--model-path", *argv]
    options, rest = build_parser().parse_known_args(argv)
    parsed = parse_args(["--log-level", "error", *rest], prog=PROG)
    for notice in parsed.notices:
        out.write(f"{notice}\n")
    folder: Path = options.out.resolve()
    variables = environment(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The engine's child processes inherit this environment.
        os.environ.update(variables)
        began = time.monotonic()
        with Engine(server_args=ServerArgs.from_config(parsed.config)) as engine:
            if engine.context.client.limits.gives == "tokens":
                _answer(engine)
    except KeyboardInterrupt:
        return 130
    except (EngineError, OSError) as error:
        out.write(f"headrace: {error}\n")
        return 1
    files = [path for path in folder.rglob("*") if path.is_file()]
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    took = time.monotonic() - began
    out.write(
        f"{len(files)} files, {megabytes:.0f} MB in {folder}, after {took:.0f} s. Start with:\n"
    )
    assignments = " ".join(f"{name}={value}" for name, value in variables.items())
    out.write(f"{assignments} headrace serve ...\n")
    return 0


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables that make processes store compiled kernels in `folder`.

    The variables do not change the folders of downloaded models.
    """
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "HEADRACE_CACHE_DIR": str(folder / "headrace"),
    }


def _answer(engine: Engine) -> None:
    """Let the engine answer prompts of several sizes, with all kinds of sampling."""
    limits = engine.context.client.limits
    for count, length in _PROMPTS:
        most = min(limits.context_len, limits.max_total_num_tokens) // (2 * count)
        ids = [index % limits.vocab_size for index in range(max(1, min(length, most)))]
        for sampling in _SAMPLING:
            engine.generate(
                input_ids=[ids] * count, sampling_params={**sampling, "max_new_tokens": 4}
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stderr))
