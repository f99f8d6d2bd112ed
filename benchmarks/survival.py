"""Kills server processes under mixed streams, and checks that no byte of any stream changes.

    python -m benchmarks.survival [--streams 64] [--tokens 96] [--rounds 1] [--json FILE]
        [--disturb worker,worker-twice,prompts,detokenizer,restart] [SERVER OPTIONS]

This starts `python -m server.launch` (`demo-toy`, unless `--model-path` is among the server's
options). Streams of all APIs run once undisturbed, and then once for each disturbance. The pause of
a stream is the longest time without a byte, if the stream was open when a process was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.h200.server_process import free_port, wait_ready
from benchmarks.wire_streams import Reading, Stream, differences, read, streams
from headrace.bench.environment import describe_environment, write_json

_SLOW_S = 0.04
_TIMEOUT_S = 240.0


# ---- disturbing ----


def children(pid: int, name: str) -> list[int]:
    """Return the child processes of `pid` that are called `name`, oldest first."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if parent == pid and name.encode() in command:
                found.append(int(folder.name))
    return sorted(found)


class Victim:
    """A server whose processes are killed.

    Attributes:
        killed_at: `time.monotonic()` of the first kill of a run.
    """

    def __init__(self, url: str, pid: int) -> None:
        """Prepare to disturb the server at `url`, whose front is process `pid`."""
        self.url = url
        self._pid = pid
        self.killed_at = 0.0

    def kill(self, name: str) -> None:
        """Kill the newest process called `name` with SIGKILL."""
        self.killed_at = self.killed_at or time.monotonic()
        os.kill(children(self._pid, name)[-1], signal.SIGKILL)

    async def run(
        self, wanted: list[Stream], disturb: Callable[[Victim, list[Reading]], Awaitable[None]]
    ) -> list[Reading]:
        """Read all streams while `disturb` runs."""
        self.killed_at = 0.0
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=_TIMEOUT_S, limits=limits
        ) as client:
            await self.slow_down(client, _SLOW_S)
            bodies = [{**each.body, **each.body.get("sampling_params", {})} for each in wanted]
            readings = [Reading(num_samples=body.get("n", 1)) for body in bodies]
            pairs = zip(wanted, readings, strict=True)
            tasks = [asyncio.ensure_future(read(client, each, into)) for each, into in pairs]
            await disturb(self, readings)
            await asyncio.gather(*tasks)
            await self.slow_down(client, 0.0)
        return readings

    async def all_admitted(self, readings: list[Reading]) -> None:
        """Wait until the scheduler has admitted every request.

        A request that arrives while no worker is ready would be refused.
        """
        async with httpx.AsyncClient(base_url=self.url, timeout=_TIMEOUT_S) as client:
            deadline = time.monotonic() + _TIMEOUT_S
            num_known = 0
            while num_known < sum(each.num_samples for each in readings):
                assert time.monotonic() < deadline, "not all were admitted"
                loads = (await client.get("/v1/loads")).json()["loads"]
                num_known = sum(
                    load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads
                )
                num_known += sum(each.num_samples for each in readings if each.is_done)

    @staticmethod
    async def slow_down(client: httpx.AsyncClient, seconds: float) -> None:
        """Make each step longer, so that no stream ends before the kill.

        This also waits until every replica is ready.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        body = {"forward_sleep_time": seconds}
        while (await client.post("/slow_down", json=body)).status_code != 200:
            assert time.monotonic() < deadline, "never ready again"
            await asyncio.sleep(0.05)


async def in_mid_answer(victim: Victim, readings: list[Reading]) -> None:
    """Wait until most streams have received their first events."""
    await victim.all_admitted(readings)
    deadline = time.monotonic() + _TIMEOUT_S
    # Answers that are not streamed have no events before their end, so not all readings are
    # awaited.
    while sum(len(each.times) > 3 for each in readings) < 0.75 * len(readings):
        assert time.monotonic() < deadline, "the streams did not begin"
        await asyncio.sleep(0.01)


async def _worker(victim: Victim, readings: list[Reading]) -> None:
    await in_mid_answer(victim, readings)
    victim.kill("scheduler")


async def _detokenizer(victim: Victim, readings: list[Reading]) -> None:
    await in_mid_answer(victim, readings)
    victim.kill("detokenizer")


async def _prompts(victim: Victim, readings: list[Reading]) -> None:
    await victim.all_admitted(readings)
    victim.kill("scheduler")


async def _twice(victim: Victim, readings: list[Reading]) -> None:
    await _worker(victim, readings)
    seen = [len(each.times) for each in readings]
    while sum(len(r.times) > s for r, s in zip(readings, seen, strict=True)) < len(seen) // 4:
        await asyncio.sleep(0.01)
        # For a second, a client may still read what the killed process had sent.
        if time.monotonic() < victim.killed_at + 1.0:
            seen = [len(each.times) for each in readings]
    victim.kill("scheduler")


async def _restart(victim: Victim, readings: list[Reading]) -> None:
    await in_mid_answer(victim, readings)
    victim.killed_at = time.monotonic()
    async with httpx.AsyncClient(base_url=victim.url, timeout=_TIMEOUT_S) as client:
        answer = await client.post("/restart_worker")
    assert answer.status_code == 200, answer.text


async def _nothing(victim: Victim, readings: list[Reading]) -> None:
    del victim, readings


DISTURBANCES: dict[str, Callable[[Victim, list[Reading]], Awaitable[None]]] = {
    "worker": _worker,
    "worker-twice": _twice,
    "prompts": _prompts,
    "detokenizer": _detokenizer,
    "restart": _restart,
    "nothing": _nothing,
}


async def measure(options: argparse.Namespace, server: list[str]) -> dict[str, Any]:
    """Start a server and disturb it; return the pauses and the differences."""
    port = free_port()
    command = [sys.executable, "-m", "server.launch", "--port", str(port), "--log-level", "error"]
    if "--model-path" not in server:
        command += ["--model-path", "demo-toy"]
    process = await asyncio.create_subprocess_exec(*command, *server)
    results: dict[str, Any] = {}
    try:
        url = f"http://127.0.0.1:{port}"
        await wait_ready(url, process)
        victim = Victim(url, process.pid)
        has_grammars = "none" not in server
        wanted = streams(options.streams, options.tokens, has_grammars=has_grammars)
        before = await victim.run(wanted, _nothing)
        for name in options.disturb.split(","):
            pauses, wrong = [], []
            for _ in range(options.rounds):
                after = await victim.run(wanted, DISTURBANCES[name])
                pauses += [p for each in after if (p := each.pause_s(victim.killed_at)) > 0]
                wrong += differences(before, after)
            results[name] = {
                "streams": options.rounds * len(wanted),
                "paused": len(pauses),
                "pause_p50_s": _percentile(pauses, 0.5),
                "pause_p99_s": _percentile(pauses, 0.99),
                "different_or_failed": len(wrong),
            }
            print(name, results[name], flush=True)
            for each in wrong[:3]:
                print("   ", each, flush=True)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()
    return results


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)


def main() -> int:
    """Print the results; return 1 if a stream failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--disturb", default="worker,worker-twice,prompts,detokenizer,restart")
    parser.add_argument("--json", type=Path)
    options, server = parser.parse_known_args()
    results = asyncio.run(measure(options, server))
    if options.json is not None:
        write_json(options.json, {"environment": describe_environment(), **results})
    return int(any(each["different_or_failed"] for each in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
