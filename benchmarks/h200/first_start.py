"""Measures how long a server takes to start with and without compiled kernels.

    python -m benchmarks.h200.first_start 8b [--json FILE] [options of the server]

The server starts with an empty folder of compiled kernels, and then again with the same folder. The
time runs from the start of the process until `/readyz` says that it is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.h200.server_process import running_server
from headrace.bench.environment import describe_environment, write_json
from headrace.bench.shapes import SHAPES


async def ready_after(shape: str, options: Sequence[str]) -> float:
    """Start a server and stop it; return the seconds until it was ready."""
    async with running_server(shape, ["--log-level", "info", *options]) as server:
        return server.ready_s


def kernels_in(folder: str) -> int:
    """Return the number of compiled kernels in a folder of Triton's."""
    return len(list(Path(folder).rglob("*.cubin")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--json", type=Path)
    given, options = parser.parse_known_args()
    starts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-kernels-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # The server inherits it.
        for name in ("first", "second"):
            seconds = asyncio.run(ready_after(given.shape, options))
            starts.append({"start": name, "ready_s": seconds, "kernels": kernels_in(folder)})
            print(f"{name} start: ready after {seconds:.1f} s, {starts[-1]['kernels']} kernels")
    if given.json:
        result = {"shape": given.shape, "options": options, "starts": starts}
        write_json(given.json, {"environment": describe_environment(), **result})


if __name__ == "__main__":
    main()
