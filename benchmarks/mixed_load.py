"""Minutes of mixed traffic with the pool at its limit: no error, and all gauges idle afterwards.

    python -m benchmarks.mixed_load --seconds 600 [--concurrency 96] [--json FILE] [SERVER OPTIONS]

Starts `python -m server.launch` (`demo-toy` unless `--model-path` is among the server's
options) and sends prompts of all lengths, greedy and sampled, penalties, log-probabilities, several
samples, shared prefixes, grammars if the server has them, aborts by id, clients that disconnect,
and bad requests. `--max-total-tokens` is set low, so that requests are retracted and recomputed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.h200.server_process import free_port, wait_ready
from headrace.bench.environment import describe_environment, write_json
from headrace.http_stream import HttpClient

WORDS = [
    "the",
    "miller",
    "opens",
    "gate",
    "water",
    "turns",
    "wheel",
    "and",
    "stones",
    "grind",
    "what",
    "is",
    "capital",
    "of",
    "France",
    "12",
    "+",
    "7",
]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
KINDS = (
    ("plain",) * 5
    + ("stream",) * 3
    + ("logprobs", "samples", "prefix", "grammar", "abort", "leave", "bad")
)
SETTLE_S = 10.0


class Traffic:
    """Sends requests of random kinds until a deadline and counts their outcomes."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.tokens = 0
        self.most_used = 0.0
        self.has_grammars = True
        self.prefix = self._text(60)

    def _text(self, num_words: int) -> str:
        return " ".join(self.rng.choice(WORDS) for _ in range(num_words))

    def _body(self) -> dict[str, Any]:
        rng = self.rng
        sampling: dict[str, Any] = {"max_new_tokens": rng.choice((1, 8, 40, 120, 300))}
        sampling["temperature"] = rng.choice((0.0, 0.0, 0.7, 1.2))
        if rng.random() < 0.3:
            sampling |= {"top_p": 0.9, "top_k": 30, "min_p": 0.01}
        if rng.random() < 0.2:
            sampling |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1}
        if rng.random() < 0.2:
            sampling |= {"logit_bias": {"17": 2.0}, "min_new_tokens": 1}
        sampling["ignore_eos"] = rng.random() < 0.5
        return {"text": self._text(rng.choice((1, 10, 60, 200, 400))), "sampling_params": sampling}

    async def worker(self, number: int, until: float) -> None:
        """Run one client after the other."""
        count = 0
        while time.monotonic() < until:
            kind = self.rng.choice(KINDS)
            count += 1
            client = HttpClient(self.url, {"Content-Type": "application/json"}, timeout_s=120.0)
            try:
                await self._send(client, kind, f"{number}-{count}")
                self.done[kind] += 1
            except Exception as error:
                self.wrong.append(f"{kind}: {type(error).__name__} {str(error)[:200]}")
            finally:
                client.close()

    async def _send(self, client: HttpClient, kind: str, name: str) -> None:
        body = self._body()
        if kind == "bad":
            body["sampling_params"]["temperature"] = -1
            await self._expect(client, body, 400)
            return
        if kind == "logprobs":
            body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
        elif kind == "samples":
            body["sampling_params"] |= {"n": 3, "temperature": 1.0}
        elif kind == "prefix":
            body["text"] = f"{self.prefix} {body['text']}"[:1500]
        elif kind == "grammar" and self.has_grammars:
            body["sampling_params"] = {
                "json_schema": SCHEMA,
                "max_new_tokens": 80,
                "temperature": 0.5,
            }
        if kind in ("stream", "leave", "abort"):
            await self._stream(client, kind, name, body)
            return
        for answer in await self._expect(client, body, 200):
            meta = answer["meta_info"]
            self.tokens += meta["completion_tokens"]
            assert meta["finish_reason"]["type"] in ("stop", "length"), meta["finish_reason"]
            if kind == "grammar" and self.has_grammars and meta["finish_reason"]["type"] == "stop":
                assert set(json.loads(answer["text"])) == {"name", "age"}, answer["text"]
            if kind == "logprobs":
                assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
                assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]

    async def _expect(self, client: HttpClient, body: dict[str, Any], status: int) -> list[Any]:
        got, text = await client.call("POST", "/generate", json.dumps(body).encode())
        assert got == status, f"status {got}, not {status}: {text[:200]!r}"
        answer = json.loads(text)
        return answer if isinstance(answer, list) else [answer]

    async def _stream(self, client: HttpClient, kind: str, name: str, body: dict[str, Any]) -> None:
        body |= {"stream": True, "rid": name}
        events: list[bytes] = []
        call = asyncio.ensure_future(
            client.stream(
                "/generate", json.dumps(body).encode(), lambda _, data: events.append(data)
            )
        )
        if kind == "stream":
            await call
        else:
            await asyncio.wait([call], timeout=self.rng.uniform(0.0, 0.3))
            if kind == "leave":
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                return
            other = HttpClient(self.url, {"Content-Type": "application/json"}, timeout_s=60.0)
            await other.call("POST", "/abort_request", json.dumps({"rid": name}).encode())
            other.close()
            await call
        texts = [json.loads(event) for event in events if event != b"[DONE]"]
        assert "error" not in texts[-1], texts[-1]
        last = texts[-1]["meta_info"]
        self.tokens += last["completion_tokens"]
        wanted = ("stop", "length", "abort") if kind == "abort" else ("stop", "length")
        assert last["finish_reason"]["type"] in wanted, last["finish_reason"]
        for before, after in itertools.pairwise(texts):
            assert after["text"].startswith(before["text"]), (before["text"], after["text"])


async def loads(client: HttpClient) -> dict[str, Any]:
    """The server's gauges, summed over its replicas."""
    _, text = await client.call("GET", "/v1/loads")
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
    every = json.loads(text)["loads"]
    return {name: sum(load[name] for load in every) for name in names}


async def num_retractions(client: HttpClient) -> int:
    """Return how many times a full pool retracted a request."""
    _, text = await client.call("GET", "/metrics")
    found = re.findall(r"^\w+:num_retractions_total\{.*\} (\S+)$", text.decode(), re.MULTILINE)
    return sum(int(float(count)) for count in found)


async def run(options: argparse.Namespace, server: list[str]) -> dict[str, Any]:
    port = free_port()
    command = [sys.executable, "-m", "server.launch", "--port", str(port), "--log-level", "warning"]
    if "--model-path" not in server:
        command += ["--model-path", "demo-toy"]
    command += ["--max-total-tokens", str(options.pool), "--enable-metrics", *server]
    process = await asyncio.create_subprocess_exec(*command)
    url = f"http://127.0.0.1:{port}"
    try:
        await wait_ready(url, process)
        client = HttpClient(url, {"Content-Type": "application/json"}, timeout_s=60.0)
        traffic = Traffic(url, options.seed)
        body = {"text": "a", "sampling_params": {"json_schema": SCHEMA, "max_new_tokens": 1}}
        status, _ = await client.call("POST", "/generate", json.dumps(body).encode())
        traffic.has_grammars = status == 200
        started = time.monotonic()
        until = started + options.seconds
        workers = [
            asyncio.ensure_future(traffic.worker(i, until)) for i in range(options.concurrency)
        ]
        while not all(worker.done() for worker in workers):
            await asyncio.wait(workers, timeout=5.0)
            now = await loads(client)
            traffic.most_used = max(
                traffic.most_used, now["num_used_tokens"] / now["max_total_num_tokens"]
            )
        took = time.monotonic() - started
        deadline = time.monotonic() + SETTLE_S
        idle = await loads(client)
        while idle["num_running_reqs"] + idle["num_waiting_reqs"] + idle["num_used_tokens"]:
            if time.monotonic() > deadline:
                traffic.wrong.append(f"not idle: {idle}")
                break
            await asyncio.sleep(0.2)
            idle = await loads(client)
        put_back = await num_retractions(client)
        client.close()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        code = await process.wait()
    if code:
        traffic.wrong.append(f"the server ended with exit code {code}")
    return {
        "seconds": took,
        "requests": dict(traffic.done),
        "output_tokens": traffic.tokens,
        "most_of_the_pool_used": traffic.most_used,
        "times_a_request_was_put_back": put_back,
        "grammars": traffic.has_grammars,
        "gauges_afterwards": idle,
        "wrong": traffic.wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--concurrency", type=int, default=96)
    parser.add_argument("--pool", type=int, default=12_000, help="tokens of the server's KV pool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options, server = parser.parse_known_args()
    result = asyncio.run(run(options, [each for each in server if each != "--"]))
    if options.json:
        write_json(options.json, {"environment": describe_environment(), **result})
    wrong = result.pop("wrong")
    print(json.dumps(result))
    print(f"{len(wrong)} wrong", *Counter(wrong).most_common(10), sep="\n  ")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
