"""Checks Dynamo's frontend with two workers of ours, one of which is killed or drained.

    python -m benchmarks.dynamo [--requests 200] [--json FILE]

The environment must have Dynamo (docs/dynamo.md). The measurements are those of
`benchmarks.routers`, with chats alone. Answers are compared with those of a server without Dynamo.
The frontend and the workers find each other through files, and communicate over loopback addresses.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.h200.server_process import free_port
from benchmarks.routers import Fleet, Server, measure, report, until

_MODES = {"round_robin": "round-robin", "cache_aware": "kv"}
_RECEIVED = re.compile(r'request received request_id=(\S+) .*endpoint="generate"')
_COMPLETED = re.compile(r'request completed request_id=(\S+) .*endpoint="generate"')


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which processes find each other in `folder`, on loopback."""
    here = dict.fromkeys(
        ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"), "127.0.0.1"
    )
    return {
        **os.environ,
        **here,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    }


class Worker(Server):
    """One `python -m headrace.dynamo` with the demo model."""

    async def start(self) -> None:
        """Start the process; the frontend says when the worker is ready."""
        command = [sys.executable, "-m", "headrace.dynamo", "--model-path", "demo-toy"]
        command += ["--context-length", "1024", "--num-threads", "1"]
        with self._log.open("w") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, env=environment(self._log.parent)
            )

    def _ids(self, what: re.Pattern[str]) -> set[str]:
        return set(what.findall(self._log.read_text()))

    @property
    def num_served(self) -> int:
        """Return how many requests the worker has answered since its last start."""
        return len(self._ids(_COMPLETED))

    async def in_flight(self, client: httpx.AsyncClient) -> int:
        """Return how many requests the worker has accepted and not finished."""
        del client
        return len(self._ids(_RECEIVED) - self._ids(_COMPLETED))


class DynamoFleet(Fleet):
    """Two workers behind Dynamo's frontend, and a server without Dynamo to compare with."""

    _only_chat = True

    def __init__(self, folder: Path, client: httpx.AsyncClient) -> None:
        """Prepare the workers and the server."""
        super().__init__("sglang-router", sys.executable, folder, client)
        self.servers = [Worker(folder), Worker(folder)]
        self._has_workers = False

    async def start(self) -> None:
        """Start the server; `route` starts the workers."""
        await self._direct.start()

    async def route(self, policy: str) -> float:
        """Start workers with empty caches, and a frontend with the mode for `policy`."""
        await self.stop_workers()
        # Otherwise the frontend counts the workers that were killed.
        shutil.rmtree(self._folder / "discovery", ignore_errors=True)
        began = time.monotonic()
        await asyncio.gather(*(worker.start() for worker in self.servers))
        self._has_workers = True
        port = free_port()
        command = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        command += ["--http-port", str(port), "--router-mode", _MODES[policy]]
        command += ["--migration-limit", "3"]
        with (self._folder / f"frontend_{policy}.log").open("w") as log:
            self._router = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, env=environment(self._folder)
            )
        self._url = f"http://127.0.0.1:{port}"
        await until(lambda: self._sees(2))
        return time.monotonic() - began

    async def stop_workers(self) -> None:
        """Stop the frontend and the workers, if they run."""
        await self.stop_router()
        for worker in self.servers if self._has_workers else ():
            if worker.process.returncode is None:
                worker.process.kill()
                await worker.process.wait()

    async def stop(self) -> None:
        """Stop all processes."""
        await self.stop_workers()
        self.servers = []
        await super().stop()

    async def _sees(self, count: int) -> bool:
        try:
            found = (await self._client.get(f"{self._url}/health")).json()["instances"]
            models = (await self._client.get(f"{self._url}/v1/models")).json()["data"]
        except (httpx.HTTPError, ValueError, KeyError):
            return False
        return bool(models) and sum(each["endpoint"] == "generate" for each in found) == count


def main() -> int:
    """Print the results; return 1 if there are wrong or unexplained failed answers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = asyncio.run(measure(DynamoFleet, options.requests))
    return report(results, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
