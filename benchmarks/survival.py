"""Mixed streams while processes are killed: every byte as undisturbed, and how long each paused.

    python -m benchmarks.survival [--streams 64] [--tokens 96] [--rounds 1] [--json FILE]
        [--disturb worker,worker-twice,prompts,detokenizer,restart] [SERVER OPTIONS]

Starts `python -m server.launch` (`demo-toy` unless `--model-path` is among the server's options),
runs streams of all wires undisturbed, then runs the same ones once for each disturbance. A pause is
the longest time without a byte in a stream that was open when its process was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.h200.server_process import free_port, wait_ready
from headrace.bench.environment import describe_environment, write_json

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {"name": "grind", "description": "Grinds grain.", "parameters": SCHEMA}
# Differ from run to run, or say how the bytes came to be.
_VOLATILE = frozenset(
    [
        "id",
        "item_id",
        "call_id",
        "created",
        "created_at",
        "completed_at",
        "sequence_number",
        "cached_tokens",
        "dp_rank",
        "e2e_latency",
        "response_sent_to_client_ts",
        "total_duration",
        "load_duration",
        "prompt_eval_duration",
        "eval_duration",
        "prompt_tokens_details",
        "input_tokens_details",
        "cache_read_input_tokens",
    ]
)
_TEXTS = frozenset(
    [
        "content",
        "text",
        "delta",
        "arguments",
        "partial_json",
        "thinking",
        "reasoning_content",
        "reasoning",
    ]
)
_COLUMNS = frozenset(["content", "tokens", "token_logprobs", "top_logprobs", "text_offset"])
_SLOW_S = 0.04
_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Stream:
    """One request.

    Attributes:
        path: of its route.
        body: what is posted.
    """

    path: str
    body: dict[str, Any]


@dataclass
class Reading:
    """What came of a stream.

    Attributes:
        merged: its events put together, without what differs from run to run.
        times: `time.monotonic()` of its begin and of each event.
        error: why it failed; empty if it did not.
        num_samples: outputs that the request asks for.
        is_done: whether it was read to its end.
    """

    merged: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    error: str = ""
    num_samples: int = 1
    is_done: bool = False

    def pause_s(self, killed_at: float) -> float:
        """The longest time without an event from `killed_at` on, if some came before and after."""
        if len(self.times) < 3 or self.times[-1] < killed_at or self.times[1] > killed_at:
            return 0.0
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - max(a, killed_at) for a, b in pairs if b >= killed_at), default=0.0)


def streams(count: int, num_tokens: int, *, has_grammars: bool) -> list[Stream]:
    """Return `count` requests of all wires and features, greedy and seeded."""
    return [_stream(index, num_tokens, has_grammars=has_grammars) for index in range(count)]


def _stream(index: int, num_tokens: int, *, has_grammars: bool) -> Stream:
    text = f"{index} The miller opens the gate, and the water " + "turns the wheel " * (index % 5)
    seeded = {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0.0}
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
    sampling |= {"sampling_seed" if key == "seed" else key: each for key, each in seeded.items()}
    native = [
        {"sampling_params": sampling},
        {"sampling_params": {**sampling, "n": 2}},
        {
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        },
        {"sampling_params": {**sampling, "stop": ["ae", "zq", " th"], "min_new_tokens": 12}},
        {"sampling_params": {**sampling, "repetition_penalty": 1.1, "frequency_penalty": 0.3}},
        {"sampling_params": sampling, "stream": False},
    ]
    ends = {**sampling, "ignore_eos": False}
    constrained = [
        {"sampling_params": {**ends, "regex": "([a-f]{4} ){9}[0-9]{12}"}},
        {"sampling_params": {**ends, "json_schema": json.dumps(SCHEMA)}},
    ]
    messages = [{"role": "user", "content": text}]
    chat = {"model": "default", "messages": messages, "max_tokens": num_tokens, "stream": True}
    chats = [
        {"stream_options": {"include_usage": True}},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"stop": ["ee", "qu"]},
    ]
    schema = {"name": "miller", "schema": SCHEMA, "strict": True}
    chats_constrained: list[dict[str, Any]] = [
        {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": schema}},
    ]
    if has_grammars:
        native, chats = native + constrained, chats + chats_constrained
    common = {"model": "default", "stream": True, "temperature": 0.0}
    anthropic = {**common, "messages": messages, "max_tokens": num_tokens}
    responses = {**common, "input": text, "max_output_tokens": num_tokens, "store": False}
    ollama = {"num_predict": num_tokens, **seeded}
    kinds = [
        *(Stream("/generate", {"text": text, "stream": True, **each}) for each in native),
        *(Stream("/v1/chat/completions", {**chat, **seeded, **each}) for each in chats),
        Stream(
            "/v1/completions",
            {
                "model": "default",
                "prompt": text,
                "max_tokens": num_tokens,
                "stream": True,
                "logprobs": 2,
                **seeded,
            },
        ),
        Stream("/v1/responses", responses),
        Stream("/v1/messages", anthropic),
        Stream("/api/chat", {"model": "default", "messages": messages, "options": ollama}),
    ]
    return kinds[index % len(kinds)]


# ---- reading ----


def _merge(into: dict[str, Any], event: dict[str, Any]) -> None:
    for key, value in event.items():
        if key in _VOLATILE:
            continue
        before = into.get(key)
        if isinstance(value, dict):
            if not isinstance(before, dict):
                before = into[key] = {}
            _merge(before, value)
        elif isinstance(value, str) and key in _TEXTS:
            into[key] = (before if isinstance(before, str) else "") + value
        elif isinstance(value, list) and value and all(_is_indexed(each) for each in value):
            if not isinstance(before, dict):
                before = into[key] = {}
            for each in value:
                _merge(before.setdefault(str(each["index"]), {}), each)
        elif isinstance(value, list) and key in _COLUMNS and isinstance(before, list):
            into[key] = before + _stable(value)
        elif value is not None or key not in into:
            into[key] = _stable(value)


def _stable(value: Any) -> Any:
    """A value without what differs from run to run."""
    if isinstance(value, list):
        return [_stable(each) for each in value]
    if isinstance(value, dict):
        return {key: _stable(each) for key, each in value.items() if key not in _VOLATILE}
    return value


def _is_indexed(value: object) -> bool:
    return isinstance(value, dict) and "index" in value


def _add(reading: Reading, stream: Stream, event: dict[str, Any]) -> None:
    if event.get("error"):
        reading.error = json.dumps(event["error"])[:300]
    if event.get("type") == "ping":
        return
    if event.get("type") == "message_start":
        # It counts the tokens that the first event happened to have.
        event["message"].pop("usage", None)
    name = ".".join(
        str(event[key])
        for key in ("type", "output_index", "content_index", "index")
        if key in event
    )
    slot = reading.merged.setdefault(name, {})
    if stream.path != "/generate":
        _merge(slot, event)
        return
    # Each event has the whole answer so far.
    before, now = slot.get("text", ""), event.get("text", "")
    if not now.startswith(before):
        reading.error = reading.error or f"text taken back: {before!r} {now!r}"
    slot.clear()
    _merge(slot, event)


async def read(client: httpx.AsyncClient, stream: Stream, reading: Reading) -> None:
    """Read a stream to its end into `reading`."""
    reading.times.append(time.monotonic())
    try:
        async with client.stream("POST", stream.path, json=stream.body) as response:
            if response.status_code != 200:
                body = (await response.aread()).decode(errors="replace")
                reading.error = f"{stream.path}: {response.status_code} {body[:300]}"
                return
            async for line in response.aiter_lines():
                if not line:
                    continue
                reading.times.append(time.monotonic())
                data = line.removeprefix("data: ")
                if data.startswith("{"):
                    _add(reading, stream, json.loads(data))
                elif data.startswith("[{"):
                    for index, event in enumerate(json.loads(data)):
                        _add(reading, stream, {"index": index, **event})
    except httpx.HTTPError as error:
        reading.error = f"{stream.path}: {type(error).__name__} {error}"
    reading.is_done = True


# ---- disturbing ----


def children(pid: int, name: str) -> list[int]:
    """Processes that the server `pid` has started and that are called `name`, oldest first."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if parent == pid and command[-1].decode() == name:
                found.append(int(folder.name))
    return sorted(found)


class Victim:
    """A server whose processes are killed.

    Attributes:
        killed_at: `time.monotonic()` of the first kill of a run.
    """

    def __init__(self, url: str, pid: int) -> None:
        """Disturb the server at `url`, whose front is process `pid`."""
        self.url = url
        self._pid = pid
        self.killed_at = 0.0

    def kill(self, name: str) -> None:
        """End the newest process called `name` with SIGKILL."""
        self.killed_at = self.killed_at or time.monotonic()
        os.kill(children(self._pid, name)[-1], signal.SIGKILL)

    async def run(
        self, wanted: list[Stream], disturb: Callable[[Victim, list[Reading]], Awaitable[None]]
    ) -> list[Reading]:
        """Read all streams while `disturb` is at work."""
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
        """Wait until the scheduler has every request: what comes while none is ready is refused."""
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

        This waits until every replica is ready.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        body = {"forward_sleep_time": seconds}
        while (await client.post("/slow_down", json=body)).status_code != 200:
            assert time.monotonic() < deadline, "never ready again"
            await asyncio.sleep(0.05)


async def in_mid_answer(victim: Victim, readings: list[Reading]) -> None:
    """Wait until most streams have their first events."""
    await victim.all_admitted(readings)
    deadline = time.monotonic() + _TIMEOUT_S
    # Answers that are not streamed have no event before their end.
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
        # What the dead process had sent may still be read.
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


def differences(undisturbed: list[Reading], disturbed: list[Reading]) -> list[str]:
    """Why the streams of two runs are not equal; empty if they are."""
    found = []
    for index, (before, after) in enumerate(zip(undisturbed, disturbed, strict=True)):
        if after.error:
            found.append(f"stream {index}: {after.error}")
        elif before.merged != after.merged:
            found.append(f"stream {index}: {_first_difference(before.merged, after.merged)}")
    return found


def _first_difference(before: Any, after: Any, path: str = "") -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(each for each in after if each not in before)]:
            if before.get(key) != after.get(key):
                return _first_difference(before.get(key), after.get(key), f"{path}/{key}")
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            if pair[0] != pair[1]:
                return _first_difference(*pair, f"{path}/{index}")
    return f"{path}: {str(before)[:300]} became {str(after)[:300]}"


async def measure(options: argparse.Namespace, server: list[str]) -> dict[str, Any]:
    """Start a server, disturb it, and return pauses and differences."""
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
    """Print the results; 1 if a stream failed or differs."""
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
