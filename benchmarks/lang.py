"""Measures the cost of the frontend language, and compares it with a plain client and with sglang.

    python -m benchmarks.lang [--reference FOLDER[:FOLDER]] [--rounds 3] [--json FILE]

This starts the demo server, and a bare server that answers at once, so that only the frontend's own
time remains. Each job runs in a separate process. The frontends take turns, and the median of the
rounds counts. FOLDER holds the package `sglang` of 0.5.9 (its unpacked wheel) and the dependencies
of its frontend.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.h200.server_process import free_port
from benchmarks.lang_programs import CHOICES
from headrace.bench.environment import describe_environment, write_json
from headrace.utils import wait_for_server

ROOT = Path(__file__).resolve().parents[1]
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
_META = {"prompt_tokens": 40, "cached_tokens": 0, "completion_tokens": 1, "finish_reason": None}


class BareServer(asyncio.Protocol):
    """A server that answers a frontend's requests at once, without a model."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            head, found, rest = self._data.partition(b"\r\n\r\n")
            if not found:
                return
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(rest) < length:
                return
            self._data = rest[length:]
            answer = _bare_answer(head.split(b" ", 2)[1].decode(), rest[:length])
            self._transport.write(_HEAD + str(len(answer)).encode() + b"\r\n\r\n" + answer)


def _bare_answer(path: str, body: bytes) -> bytes:
    if path != "/generate" and path != "/v1/select":
        return b'{"model_path": "bare"}'
    asked = json.loads(body)
    triples = [[-1.0, 5, " is"], [-0.5, 6, " Paris"]]
    if path == "/v1/select":
        each = {"token_logprobs": triples[1:], "unconditional_token_logprobs": None}
        each |= {"logprob": -0.5, "prob": 1 / 3}
        return json.dumps(
            {
                "choices": [each] * len(asked["choices"]),
                "meta_info": {**_META, "computed_tokens": 1},
            }
        ).encode()
    one: dict[str, Any] = {"text": " 42", "meta_info": {**_META}}
    one["meta_info"] |= {"input_token_logprobs": [[None, 4, "?"], *triples]}
    one["meta_info"] |= {"output_token_logprobs": []}
    return json.dumps(
        [one] * len(asked["text"]) if isinstance(asked["text"], list) else one
    ).encode()


async def _serve_bare(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(
        BareServer, "127.0.0.1", port, backlog=2048
    )
    await server.serve_forever()


@contextlib.contextmanager
def servers() -> Iterator[dict[str, str]]:
    """Start the demo server and the bare server; yield their addresses by name."""
    demo, bare = free_port(), free_port()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "server.launch", "--model-path", "demo-toy"),
                *("--port", str(demo), "--log-level", "warning"),
            ]
        ),
        subprocess.Popen([sys.executable, "-m", "benchmarks.lang", "--bare-port", str(bare)]),
    ]
    try:
        for port, process in zip((demo, bare), processes, strict=True):
            wait_for_server(f"http://127.0.0.1:{port}", process=process)
        yield {"demo": f"http://127.0.0.1:{demo}", "bare": f"http://127.0.0.1:{bare}"}
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def run_job(url: str, job: str, num: int, frontend: str, folders: str) -> dict[str, Any]:
    """Run one job in a separate process, and return the job's JSON."""
    path = os.pathsep.join(each for each in (str(ROOT), folders) if each)
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "lang_programs.py"), "--url", url),
            *("--job", job, "--num", str(num), "--frontend", frontend),
        ],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(url: str, job: str, num: int, sides: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Run each side in turn; return programs per second, and whether all answers agree."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, list[str]] = {}
    for _ in range(rounds):
        for name, (own_job, frontend, folders) in sides.items():
            found = run_job(url, own_job or job, num, frontend, folders)
            rates[name].append(num / found["seconds"])
            cpu[name].append(found["cpu_seconds"] / num * 1e6)
            answers[name] = found["answers"]
    first = next(iter(answers.values()))
    return {
        "job": job,
        "programs": num,
        "programs_per_second": {name: statistics.median(each) for name, each in rates.items()},
        "cpu_us_each": {name: statistics.median(each) for name, each in cpu.items()},
        "same_answers": {
            name: sum(a == b for a, b in zip(first, each, strict=True)) / len(first)
            for name, each in answers.items()
        },
    }


def main() -> None:
    """Run all comparisons, print the results, and write them to a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", default="", help="folders with `sglang`, joined by colons")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--live", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--bare-port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare_port:
        uvloop.run(_serve_bare(options.bare_port))
        return
    ours: dict[str, Any] = {"headrace": ("", "headrace", "")}
    both = dict(ours)
    if options.reference:
        both["sglang"] = ("", "sglang", options.reference)
    results = []
    with servers() as urls:
        for place, url in urls.items():
            beside = {**both, "asyncio": ("plain", "headrace", "")}
            results.append(compare(url, "batch", options.num, beside, options.rounds))
            results.append(compare(url, "select", options.num // 4, both, options.rounds))
            for each in results[-2:]:
                each["server"] = place
                print(json.dumps(each, indent=1), flush=True)
        results.append(
            {"job": "hold", **run_job(urls["demo"], "hold", options.live, "headrace", "")}
        )
        print(json.dumps(results[-1], indent=1))
    if options.json:
        write_json(
            options.json,
            {"environment": describe_environment(), "choices": CHOICES, "results": results},
        )


if __name__ == "__main__":
    main()
