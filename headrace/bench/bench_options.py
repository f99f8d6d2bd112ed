"""Options that several benchmarks share, and their checks; each error message is one line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from runtime.errors import StartupError


def check_at_least(least: int, options: argparse.Namespace, *names: str) -> None:
    """Refuse options whose number is below `least`; an option that is not given is accepted.

    Raises:
        StartupError: the first of `names` that is too small.
    """
    for name in names:
        value = getattr(options, name)
        values = value if isinstance(value, list) else [value]
        if any(each is not None and each < least for each in values):
            raise StartupError(f"--{name.replace('_', '-')} must be at least {least}.")


def check_writable(option: str, path: Path | None) -> None:
    """Check before a long run that the file at `path` can be written; create its folder.

    Raises:
        StartupError: the file cannot be written; the message says why.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"{option} {path}: {error.strerror}.") from None
    target = path if path.exists() else path.parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise StartupError(f"{option} {path}: it cannot be written.")


def add_batch_options(
    parser: argparse.ArgumentParser, *, output_len: int, num_iters: int, num_warmup: int
) -> None:
    """Add the options of a batch that is repeated, except the batch size.

    The keyword arguments are the default values of the options.
    """
    parser.add_argument("--input-len", type=int, default=512, metavar="N")
    parser.add_argument("--output-len", type=int, default=output_len, metavar="N")
    parser.add_argument(
        "--num-iters", type=int, default=num_iters, metavar="N", help="counted batches"
    )
    parser.add_argument("--num-iters-warmup", type=int, default=num_warmup, metavar="N")
    parser.add_argument("--seed", type=int, default=1)


def check_batch_options(options: argparse.Namespace) -> None:
    """Refuse invalid values of the options from `add_batch_options`.

    Raises:
        StartupError: a number is too small.
    """
    check_at_least(1, options, "batch_size", "input_len", "output_len", "num_iters")
