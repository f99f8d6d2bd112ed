"""Checks other projects' routers with two servers of ours, one of which is killed or drained.

    python -m benchmarks.routers --router sglang-router|smg|vllm-router [--requests 200]
        [--python PYTHON] [--json FILE]

`PYTHON` is the interpreter whose environment has the router; the default is the benchmark's own.
The requests belong to sessions, and those of a session begin with the same text. They use chat or
`/generate`, streamed or whole. An answer is right if it is complete and its text equals the answer
of a server that was asked directly.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.h200.server_process import free_port, wait_ready
from headrace.bench.environment import describe_environment, write_json

ROUTERS = {
    "sglang-router": "sglang_router.launch_router",
    "smg": "smg.launch_router",
    "vllm-router": "vllm_router.launch_router",
}
# With these options a router notices within seconds, not minutes, that a server is gone or back.
_HEALTH = "--health-check-interval-secs 1 --health-failure-threshold 2 --health-success-threshold 1"
# With sglang-router's default of 10 failures, one request got a 503 while a server drained.
# Probably all five of its retries went to that server before the circuit breaker opened.
_BREAKER = "--cb-failure-threshold 3 --cb-timeout-duration-secs 2 --worker-startup-check-interval 1"
_NUM_AT_ONCE = 16
# Odd, so that a router that alternates between two servers sends each session to both.
_NUM_SESSIONS = 21
_NUM_TOKENS = 24
_TIMEOUT_S = 120.0
_SERVED = re.compile(r"POST /(generate|v1/chat/completions)\b.* 200\b")


class Server:
    """One `python -m server.launch` of the demo model; after a restart it has the same port."""

    def __init__(self, folder: Path) -> None:
        """Choose a port; the server's log is written into `folder`."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"{self.port}.log"
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        """Start the server, and return once it is ready."""
        command = [sys.executable, "-m", "server.launch", "--model-path", "demo-toy"]
        command += ["--port", str(self.port), "--context-length", "1024", "--enable-cache-report"]
        with self._log.open("w") as log:
            self.process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        await wait_ready(self.url, self.process)

    @property
    def num_served(self) -> int:
        """Return how many requests the server has answered since its last start."""
        return len(_SERVED.findall(self._log.read_text()))

    async def in_flight(self, client: httpx.AsyncClient) -> int:
        """Return how many requests the server has accepted and not finished."""
        loads = (await client.get(f"{self.url}/v1/loads")).json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


@dataclass
class Outcome:
    """The outcome of one request.

    Attributes:
        text: text of the answer, as far as it was received.
        failure: `refused` with a status, or `cut` for an answer that broke off; empty for a
            complete answer.
        num_prompt: number of prompt tokens.
        num_cached: number of prompt tokens that the server had cached.
    """

    text: str = ""
    failure: str = ""
    num_prompt: int = 0
    num_cached: int = 0


def request(index: int, name: str, *, only_chat: bool = False) -> tuple[str, dict[str, Any]]:
    """Return path and body of request `index`; runs with different names share no prefix."""
    session = index % _NUM_SESSIONS
    text = f"{name} {session}. " + f"The miller of house {session} opens the gate. " * 20
    text += f"Question {index // _NUM_SESSIONS}: what is the capital of France?"
    is_stream = index // 2 % 2 == 0
    if session % 2 and not only_chat:
        sampling = {"temperature": 0, "max_new_tokens": _NUM_TOKENS, "ignore_eos": True}
        return "/generate", {"text": text, "sampling_params": sampling, "stream": is_stream}
    body: dict[str, Any] = {"model": "demo-toy", "temperature": 0, "max_tokens": _NUM_TOKENS}
    body |= {"messages": [{"role": "user", "content": text}], "ignore_eos": True}
    if is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return "/v1/chat/completions", body


def _take(outcome: Outcome, answer: dict[str, Any]) -> None:
    """Add an answer, or an event of a stream, to `outcome`."""
    if answer.get("error"):
        outcome.failure = "cut"
    if meta := answer.get("meta_info"):
        # `/generate` repeats the text so far in each event.
        outcome.text = answer["text"]
        outcome.num_prompt, outcome.num_cached = meta["prompt_tokens"], meta["cached_tokens"]
    for choice in answer.get("choices", ()):
        outcome.text += choice.get("message", choice.get("delta", {})).get("content") or ""
    if usage := answer.get("usage"):
        outcome.num_prompt = usage["prompt_tokens"]
        outcome.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def ask(client: httpx.AsyncClient, url: str, path: str, body: dict[str, Any]) -> Outcome:
    """Send one request and read its answer to the end."""
    outcome = Outcome()
    try:
        async with client.stream("POST", url + path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                outcome.failure = f"refused {response.status_code}"
            elif not body.get("stream"):
                _take(outcome, json.loads(await response.aread()))
            else:
                # If this line is missing, the stream broke off, even if the router closed it
                # properly.
                is_complete = False
                async for line in response.aiter_lines():
                    is_complete = is_complete or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        _take(outcome, json.loads(line.removeprefix("data: ")))
                outcome.failure = outcome.failure or ("" if is_complete else "cut")
    except httpx.HTTPError:
        outcome.failure = "cut"
    return outcome


async def ask_all(
    client: httpx.AsyncClient,
    url: str,
    count: int,
    name: str,
    done: list[Outcome],
    *,
    only_chat: bool = False,
) -> list[Outcome]:
    """Send the requests of a run, sixteen at a time; each outcome is appended to `done`."""
    numbers = iter(range(count))
    outcomes = [Outcome()] * count

    async def work() -> None:
        for index in numbers:
            sent = request(index, name, only_chat=only_chat)
            outcomes[index] = await ask(client, url, *sent)
            done.append(outcomes[index])

    await asyncio.gather(*(work() for _ in range(_NUM_AT_ONCE)))
    return outcomes


class Fleet:
    """Two servers behind one router."""

    _only_chat = False

    def __init__(self, router: str, python: str, folder: Path, client: httpx.AsyncClient) -> None:
        """Prepare the servers; `router` is a key of `ROUTERS`, which `python` can import."""
        self.servers = [Server(folder), Server(folder)]
        self._direct = self.servers[0]
        self._module, self._python, self._folder = ROUTERS[router], python, folder
        self._client = client
        self._expected: dict[str, list[str]] = {}
        self._router: asyncio.subprocess.Process | None = None
        self._url = ""

    async def start(self) -> None:
        """Start the servers."""
        await asyncio.gather(*(server.start() for server in {*self.servers, self._direct}))

    async def route(self, policy: str) -> float:
        """Start a router with `policy`; return the seconds until both servers are registered."""
        await self.stop_router()
        for server in self.servers:
            (await self._client.post(f"{server.url}/flush_cache")).raise_for_status()
        port = free_port()
        command = [self._python, "-m", self._module, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-urls", *(server.url for server in self.servers)]
        command += ["--policy", policy, "--prometheus-port", str(free_port())]
        command += [*_HEALTH.split(), *_BREAKER.split()]
        began = time.monotonic()
        with (self._folder / f"router_{policy}.log").open("w") as log:
            self._router = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        self._url = f"http://127.0.0.1:{port}"
        await until(lambda: self._sees(2))
        return time.monotonic() - began

    async def stop_router(self) -> None:
        """Stop the router, if one runs."""
        if self._router is not None and self._router.returncode is None:
            # Some routers wait for open connections after SIGTERM; no request is open here, so the
            # router is killed.
            self._router.kill()
            await self._router.wait()

    async def stop(self) -> None:
        """Stop the router and the servers."""
        await self.stop_router()
        for server in {*self.servers, self._direct}:
            if server.process.returncode is None:
                server.process.send_signal(signal.SIGTERM)
                await server.process.wait()

    async def _sees(self, count: int) -> bool:
        try:
            workers = (await self._client.get(f"{self._url}/workers")).json()["workers"]
        except (httpx.HTTPError, ValueError):
            return False
        return sum(_is_healthy(each) for each in workers) == count

    async def _ask_all(
        self, count: int, name: str, done: list[Outcome], *, url: str = ""
    ) -> list[Outcome]:
        """Send requests to the router, or to `url`."""
        target = url or self._url
        return await ask_all(self._client, target, count, name, done, only_chat=self._only_chat)

    async def _counts(self, outcomes: list[Outcome], name: str) -> dict[str, Any]:
        """Compare the outcomes with a server's direct answers; count wrong ones and failures."""
        if name not in self._expected:
            direct = await self._ask_all(len(outcomes), name, [], url=self._direct.url)
            assert not any(each.failure for each in direct)
            self._expected[name] = [each.text for each in direct]
        pairs = list(zip(outcomes, self._expected[name], strict=True))
        failures = Counter(each.failure for each in outcomes if each.failure)
        num_prompt = sum(each.num_prompt for each in outcomes)
        num_cached = sum(each.num_cached for each in outcomes)
        return {
            "requests": len(outcomes),
            "right": sum(not each.failure and each.text == text for each, text in pairs),
            "wrong": sum(not each.failure and each.text != text for each, text in pairs),
            "failed": dict(sorted(failures.items())),
            "cached_share": num_cached / max(1, num_prompt),
        }

    async def undisturbed(self, count: int) -> dict[str, Any]:
        """Send requests while both servers run."""
        served = [server.num_served for server in self.servers]
        outcomes = await self._ask_all(count, "Mill", [])
        served = [
            server.num_served - before for server, before in zip(self.servers, served, strict=True)
        ]
        return {**await self._counts(outcomes, "Mill"), "busiest_share": max(served) / count}

    async def disturbed(self, count: int, number: signal.Signals) -> dict[str, Any]:
        """Send the signal `number` to a server after a third of the requests; restart it later."""
        name, victim, done = number.name, self.servers[1], list[Outcome]()
        running = asyncio.create_task(self._ask_all(count, name, done))

        async def is_busy() -> bool:
            return len(done) >= count // 3 and await victim.in_flight(self._client) > 2

        await until(is_busy)
        in_flight = await victim.in_flight(self._client)
        victim.process.send_signal(number)
        outcomes = await running
        status = await victim.process.wait()
        result = {**await self._counts(outcomes, name), "in_flight": in_flight, "status": status}
        await victim.start()
        began = time.monotonic()
        await until(lambda: self._sees(2))
        # Send new sessions, because the router may send these to the empty server.
        for attempt in itertools.count():
            again = await self._ask_all(_NUM_AT_ONCE, f"New {attempt}", [])
            result["failed_after"] = sum(bool(each.failure) for each in again)
            if victim.num_served or attempt == 20:
                break
        return {**result, "used_again_s": time.monotonic() - began if victim.num_served else None}


def _is_healthy(worker: dict[str, Any]) -> bool:
    return bool(worker.get("is_healthy", worker.get("status") == "ready"))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds; raise AssertionError after two minutes."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not await condition():
        assert time.monotonic() < deadline, "waited for two minutes"
        await asyncio.sleep(0.05)


async def measure(make: Callable[[Path, httpx.AsyncClient], Fleet], count: int) -> dict[str, Any]:
    """Run all measurements with the router of the fleet that `make` returns."""
    with tempfile.TemporaryDirectory(prefix="bench-routers-") as folder:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits) as client:
            fleet = make(Path(folder), client)
            try:
                await fleet.start()
                results: dict[str, Any] = {}
                for policy in ("round_robin", "cache_aware"):
                    results["registered_s"] = await fleet.route(policy)
                    results[policy] = await fleet.undisturbed(count)
                for name, number in (("killed", signal.SIGKILL), ("drained", signal.SIGTERM)):
                    results[name] = await fleet.disturbed(count, number)
            finally:
                await fleet.stop()
    return results


def problems(results: dict[str, Any]) -> list[str]:
    """Return the errors: wrong answers, and failures that the kill does not explain."""
    found = []
    for name in ("round_robin", "cache_aware", "killed", "drained"):
        result = results[name]
        allowed = result["in_flight"] if name == "killed" else 0
        if result["wrong"] or sum(result["failed"].values()) > allowed:
            found.append(f"{name}: {result}")
    found += [
        f"{name}: the server was not used again: {results[name]}"
        for name in ("killed", "drained")
        if results[name]["failed_after"] or results[name]["used_again_s"] is None
    ]
    if results["drained"]["status"]:
        found.append("The drained server did not end properly.")
    return found


def main() -> int:
    """Measure the router that the command line names; return 1 if `problems` finds any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--router", choices=ROUTERS, required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    make = partial(Fleet, options.router, options.python)
    return report(asyncio.run(measure(make, options.requests)), options.json)


def report(results: dict[str, Any], path: Path | None) -> int:
    """Print the results, and write them to `path`; return 1 if `problems` finds any."""
    for name, result in results.items():
        print(f"{name:12} {result}")
    for problem in (found := problems(results)):
        print("PROBLEM", problem)
    if path is not None:
        write_json(path, {"environment": describe_environment(), **results})
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
