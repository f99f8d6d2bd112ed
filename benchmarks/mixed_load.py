"""Runs many kinds of clients against a server for a while, and kills its processes meanwhile.

    python -m benchmarks.mixed_load [--minutes 40] [--clients 6] [--kill-every 60] [--pool 384]
        [--json FILE] [--plot FILE.svg] [--samples FILE] [SERVER OPTIONS]

This starts `python -m server.launch` (`demo-vision` with adapters, unless `--model-path` is among
the server's options), and starts the front again whenever it ends. The requests use all APIs. They
are streamed and whole, greedy and seeded, and use grammars, tools, adapters, images and several
samples. Some clients read slowly, leave early, abort, or send a request that must be refused. Each
answer is compared with the answer to the same request before anything was killed. Once a minute
`kill -9` ends one random process. The front is chosen half as often as any other process, so that
its memory can be observed for longer; `--kill-every 0` kills nothing. `--pool` is small, so that
requests are retracted and recomputed. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

from benchmarks.h200.server_process import free_port
from benchmarks.mixed_traffic import (
    ANSWERED_400,
    ANSWERED_503,
    FRONT_AWAY,
    KEPT_RUNNING,
    Kill,
    Traffic,
    requests,
)
from benchmarks.process_watch import Life, SupervisedServer, Watch, slope_per_hour
from headrace.bench.environment import describe_environment, write_json
from headrace.bench.plot import Line, Panel, draw_panels
from runtime.checkpoint.demo import find_demo
from runtime.checkpoint.peft_adapter import CONFIG_FILE, TENSORS_FILE, adaptable_weights
from runtime.models.registry import read_model_spec

_READY_TIMEOUT_S = 120.0
_SAMPLE_S = 5.0
_POLL_S = 0.1
_SETTLE_S = 20.0
COUNTERS = ("num_resumed_requests_total", "num_retractions_total", "generation_tokens_total")
_MODEL = "demo-vision"
_RANK = 4
_ADAPTERS = ("sql", "verse", "short")
# Metrics that count requests under way; all are 0 when nothing runs.
GAUGES = (
    "num_running_reqs",
    "num_queue_reqs",
    "num_used_tokens",
    "num_retracted_reqs",
    "num_held_reqs",
    "num_paused_reqs",
    "num_grammar_queue_reqs",
    "decode_sum_seq_lens",
    "lora_pool_slots_used",
    "lora_requests_in_flight",
    "token_usage",
    "utilization",
)


# Short names of the outcomes, for the plot.
_SHORT = {
    ANSWERED_400: "400",
    ANSWERED_503: "503",
    FRONT_AWAY: "no front",
}


def write_adapter(folder: Path, model_folder: Path, seed: int) -> Path:
    """Write a random adapter for all linear layers, in PEFT's file format."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, weight in adaptable_weights(read_model_spec(model_folder)).items():
        rows, columns = weight.shape
        full = f"base_model.model.{name}"
        tensors[f"{full}.lora_A.weight"] = rng.normal(0, 0.1, (_RANK, columns)).astype("f4")
        tensors[f"{full}.lora_B.weight"] = rng.normal(0, 0.1, (rows, _RANK)).astype("f4")
    save_file(tensors, folder / TENSORS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": _RANK}))
    return folder


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).status_code == 200
    except httpx.HTTPError:
        return False


async def _wait_ready(client: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not await _is_ready(client):
        assert time.monotonic() < deadline, "not ready"
        await asyncio.sleep(_POLL_S)


async def metrics(client: httpx.AsyncClient, names: Sequence[str]) -> dict[str, float]:
    """Return the named metrics, each summed over replicas and adapters."""
    text = (await client.get("/metrics")).text
    found = re.findall(r"^sglang:(\w+)\{.*\} (\S+)$", text, re.MULTILINE)
    totals = dict.fromkeys(names, 0.0)
    for name, value in found:
        if name in totals:
            totals[name] += float(value)
    return totals


class Killer:
    """Kills a random process at intervals, and notes when the server is ready again."""

    def __init__(
        self, server: SupervisedServer, client: httpx.AsyncClient, traffic: Traffic, seed: int
    ) -> None:
        """Prepare to kill processes of `server`; each kill is noted in `traffic`."""
        self._server = server
        self._client = client
        self._traffic = traffic
        self._rng = random.Random(seed)

    async def run(self, every_s: float, until: float) -> None:
        """Kill one process every `every_s` seconds, until the time `until`."""
        next_at = time.monotonic() + every_s
        while next_at < until - every_s / 2:
            await asyncio.sleep(max(next_at - time.monotonic(), 0))
            next_at += every_s
            by_kind = {kind: pid for pid, kind in self._server.processes().items()}
            if not by_kind:
                continue
            kinds = sorted(by_kind)
            weights = [1 if kind == "front" else 2 for kind in kinds]
            kind = self._rng.choices(kinds, weights)[0]
            kill = Kill(kind, time.monotonic())
            self._traffic.kills.append(kill)
            with contextlib.suppress(ProcessLookupError):
                os.kill(by_kind[kind], signal.SIGKILL)
            await self._wait_back(kill, by_kind[kind])

    async def _wait_back(self, kill: Kill, pid: int) -> None:
        """Wait until the server is ready again and the killed process has a successor."""
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            kinds = self._server.processes()
            is_back = kill.kind not in KEPT_RUNNING or (
                pid not in kinds and kill.kind in kinds.values()
            )
            if is_back and await _is_ready(self._client):
                kill.ready_at = time.monotonic()
                return
            await asyncio.sleep(_POLL_S)
        self._traffic.outcomes.note("wrong", f"not ready again after the end of {kill.kind}")


class Totals:
    """Sums of the server's counters, which begin again at 0 when a process is restarted.

    Attributes:
        counts: totals since the start of the run, as far as they were read before a restart.
    """

    def __init__(self) -> None:
        """Begin with all counts at 0."""
        self.counts = dict.fromkeys(COUNTERS, 0.0)
        self._last = dict.fromkeys(COUNTERS, 0.0)

    async def read(self, client: httpx.AsyncClient) -> None:
        """Read the counters, and add the growth since the last reading."""
        try:
            now = await metrics(client, COUNTERS)
        except httpx.HTTPError:
            return
        for name, value in now.items():
            last = self._last[name]
            self.counts[name] += value - last if value >= last else value
            self._last[name] = value


async def _watch(watch: Watch, totals: Totals, client: httpx.AsyncClient) -> None:
    while True:
        await asyncio.to_thread(watch.sample)
        await totals.read(client)
        await asyncio.sleep(_SAMPLE_S)


async def _settle(client: httpx.AsyncClient) -> dict[str, float]:
    """Wait until all gauges are 0, or until a time limit; return the gauges."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        found = await metrics(client, GAUGES)
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_S)


async def run(options: argparse.Namespace, extra: list[str], folder: Path) -> dict[str, Any]:
    """Run the load and return the results."""
    port = free_port()
    command = [sys.executable, "-m", "server.launch", "--port", str(port)]
    adapters: tuple[str, ...] = ()
    if "--model-path" not in extra:
        model_folder = find_demo(_MODEL)[1]
        command += ["--model-path", _MODEL, "--tool-call-parser", "hermes", "--lora-paths"]
        for seed, name in enumerate(_ADAPTERS):
            path = write_adapter(folder / "adapters" / name, model_folder, seed)
            command.append(f"{name}={path}")
        command += ["--weights-root", str(folder)]
        adapters = _ADAPTERS
    command += ["--max-total-tokens", str(options.pool), "--max-loras-per-batch", "2"]
    command += ["--enable-metrics", "--log-level", "warning", *extra]
    log = folder / "server.log"
    server = SupervisedServer(command, log)
    server.start()
    url = f"http://127.0.0.1:{port}"
    wanted = requests(options.tokens, sees=not extra or "demo-vision" in extra, adapters=adapters)
    traffic = Traffic(url, wanted, options.seed)
    code = 0
    try:
        async with httpx.AsyncClient(base_url=url, timeout=10.0) as client:
            await _wait_ready(client)
            await traffic.learn(options.clients)
            begin = time.monotonic()
            until = begin + 60 * options.minutes
            watch = Watch(server, begin)
            totals = Totals()
            watching = asyncio.create_task(_watch(watch, totals, client))
            tasks = [
                asyncio.create_task(traffic.come_and_go(number, until))
                for number in range(options.clients)
            ]
            if options.kill_every:
                killer = Killer(server, client, traffic, options.seed)
                tasks.append(asyncio.create_task(killer.run(options.kill_every, until)))
            await asyncio.gather(*tasks)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await _wait_ready(client)
            left = await _settle(client)
            flushed = (await client.post("/flush_cache?timeout=10")).status_code
    finally:
        code = await server.stop()
    outcomes = traffic.outcomes
    tracebacks = log.read_text(errors="replace").count("Traceback")
    for is_wrong, text in (
        (any(left.values()), f"gauges afterwards: {left}"),
        (flushed != 200, f"/flush_cache: {flushed}"),
        (code, f"the server ended with exit code {code}"),
        (tracebacks, f"{tracebacks} tracebacks in the log"),
    ):
        if is_wrong:
            outcomes.wrong.append(text)
    return {
        "minutes": options.minutes,
        "clients": options.clients,
        "requests": dict(outcomes.counts),
        "events_read": outcomes.num_events,
        "counters": totals.counts,
        "kills": [
            {"kind": kill.kind, "at_s": kill.at - begin, "ready_after_s": kill.ready_at - kill.at}
            for kill in traffic.kills
        ],
        "starts_of_the_front": server.num_starts,
        "gauges_afterwards": left,
        "processes": processes(list(watch.lives.values())),
        "wrong": outcomes.wrong,
        "outcomes": [(when - begin, what) for when, what in outcomes.times],
        "lives": [vars(life) for life in watch.lives.values()],
    }


def processes(lives: list[Life]) -> dict[str, dict[str, Any]]:
    """Return memory and descriptors for each kind of process: level, peak and slope."""
    found = {}
    for kind in dict.fromkeys(life.kind for life in lives):
        own = [life for life in lives if life.kind == kind]
        memory = [value for life in own for value in life.pss_mb]
        descriptors = [value for life in own for value in life.descriptors]
        found[kind] = {
            "lives": len(own),
            "longest_life_s": max(life.times[-1] - life.times[0] for life in own),
            "pss_mb_median": sorted(memory)[len(memory) // 2],
            "pss_mb_most": max(memory),
            "pss_mb_per_hour": slope_per_hour(own, "pss_mb"),
            "own_mb_per_hour": slope_per_hour(own, "own_mb"),
            "descriptors_most": max(descriptors),
            "descriptors_per_hour": slope_per_hour(own, "descriptors"),
        }
    return found


def draw(result: dict[str, Any]) -> str:
    """Return a plot of memory, descriptors and outcomes over a run."""
    marks = [kill["at_s"] / 60 for kill in result["kills"]]

    def lines_of(column: str, only: str = "") -> list[Line]:
        return [
            Line(
                life["kind"],
                [(t / 60, v) for t, v in zip(life["times"], life[column], strict=True)],
            )
            for life in result["lives"]
            if only in ("", life["kind"])
        ]

    below = "minutes; red: a process was killed"
    memory, memory_unit = lines_of("pss_mb"), "MB, proportional"
    panels = [
        Panel("Memory of each process", below, memory_unit, memory, marks=marks),
        Panel("Open descriptors", below, "descriptors", lines_of("descriptors"), marks=marks),
        Panel("Memory of the front", below, memory_unit, lines_of("pss_mb", "front"), marks=marks),
    ]
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for when, outcome in result["outcomes"]:
        counts[_SHORT.get(outcome, outcome)][int(when / 60)] += 1
    last = math.ceil(result["minutes"])
    lines = [
        Line(name, [(float(minute), float(each[minute])) for minute in range(last)])
        for name, each in counts.items()
    ]
    panels.append(Panel("Requests", below, "requests a minute", lines, marks=marks))
    title = f"{result['minutes']:g} minutes of mixed load, {len(marks)} processes killed"
    return draw_panels(title, panels)


def main() -> int:
    """Run the load and print the results; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds; 0 for never")
    parser.add_argument("--pool", type=int, default=384, help="tokens of the server's KV pool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--samples", type=Path, help="every sample and outcome, as JSON")
    options, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="mixed-load-") as folder:
        result = asyncio.run(run(options, [each for each in extra if each != "--"], Path(folder)))
    if options.plot:
        options.plot.write_text(draw(result), encoding="utf-8")
    if options.samples:
        options.samples.write_text(json.dumps(result))
    del result["outcomes"], result["lives"]
    if options.json:
        write_json(options.json, {"environment": describe_environment(), **result})
    wrong = result.pop("wrong")
    print(json.dumps(result, indent=1))
    print(f"{len(wrong)} wrong", *Counter(wrong).most_common(10), sep="\n  ")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
