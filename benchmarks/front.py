"""Measures the CPU time of the front per request and per token of its stream.

    python -m benchmarks.front [--prompt 512] [--streams 64] [--tokens 100] [--json out.json]

The whole application runs in this process, from uvicorn's call to the message for the scheduler,
and from the detokenizer's deltas to the events. Sockets, HTTP parsing and the other processes are
not included. All streams are opened at once; then each step sends a token to every stream. Figures
are microseconds of process time, the best of `--repeat` runs.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from headrace.bench.environment import describe_environment, write_json
from runtime.client.admission import EngineLimits
from runtime.ipc.messages import (
    FinishReason,
    GenerateRequest,
    SchedulerInbound,
    TextDelta,
    TextDeltas,
)
from tests.support.fake_server import FakeServer

VOCAB_SIZE = 150_000
# Number of iterations of the event loop after which every stream has sent the tokens of a step.
TURNS_PER_STEP = 6


@dataclass
class Row:
    """One line of the table; times are in microseconds.

    Attributes:
        token_us: time for one token of one stream.
        events_per_token: below 1 if several tokens share an event.
    """

    path: str
    request_us: float
    token_us: float
    events_per_token: float


class Bench:
    """Streams of one route; `wave` generates their tokens."""

    def __init__(self, path: str, body: dict[str, Any], folder: Path) -> None:
        server = FakeServer(folder)
        self._app = server.app
        self._client = server.context.client
        self._client.limits = EngineLimits(2**17, 2**24, VOCAB_SIZE)
        for link in self._client.links:
            link.connect(self._receive)
        self._path = path
        self._body = json.dumps(body).encode()
        self._running: list[int] = []
        self._num_ended = 0
        self.num_events = 0

    def _receive(self, message: SchedulerInbound) -> None:
        if isinstance(message, GenerateRequest):
            self._running.append(message.request_id)

    async def _ask(self) -> None:
        headers = {"content-type": "application/json", "content-length": str(len(self._body))}
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 30000),
        }
        bodies = [self._body]

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            self.num_events += bool(message.get("body"))

        await self._app(scope, receive, send)
        self._num_ended += 1

    async def wave(self, num_streams: int, num_tokens: int) -> tuple[float, float]:
        """Return the seconds of process time to open all streams, and those of all their tokens."""
        self._running.clear()
        self._num_ended = 0
        self.num_events = 0
        begin = time.process_time()
        tasks = [asyncio.create_task(self._ask()) for _ in range(num_streams)]
        while len(self._running) < num_streams:
            assert not self._num_ended, f"{self._path} refused a request"
            await asyncio.sleep(0)
        opened = time.process_time()
        token = array.array("i", [5]).tobytes()
        for index in range(num_tokens):
            is_last = index == num_tokens - 1
            reason = FinishReason("length", length=num_tokens) if is_last else None
            deltas = [TextDelta(each, "x", token, reason, -1) for each in self._running]
            self._client.on_deltas(TextDeltas(deltas))
            for _ in range(TURNS_PER_STEP):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return opened - begin, time.process_time() - opened


async def measure(path: str, body: dict[str, Any], args: argparse.Namespace) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(path, body, Path(folder))
        await bench.wave(args.streams, args.tokens)
        waves = [await bench.wave(args.streams, args.tokens) for _ in range(args.repeat)]
    request_s, token_s = (min(column) / args.streams for column in zip(*waves, strict=True))
    # The end marker does not belong to a token.
    num_events = bench.num_events / args.streams - 1
    return Row(path, request_s * 1e6, token_s / args.tokens * 1e6, num_events / args.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=512, help="token ids of a request")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    draw = random.Random(0)
    ids = [draw.randrange(VOCAB_SIZE) for _ in range(args.prompt)]
    sampling = {"temperature": 0, "max_new_tokens": args.tokens, "ignore_eos": True}
    question = [{"role": "user", "content": "x" * args.prompt}]
    limits = {"temperature": 0, "max_tokens": args.tokens, "stream": True}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"input_ids": ids, "sampling_params": sampling, "stream": True},
        "/v1/completions": {"model": "fake", "prompt": ids, **limits},
        "/v1/chat/completions": {"model": "fake", "messages": question, **limits},
    }
    rows = [uvloop.run(measure(path, body, args)) for path, body in bodies.items()]
    print(f"{'route':22} {'request us':>10} {'token us':>9} {'events a token':>15}")
    for row in rows:
        print(
            f"{row.path:22} {row.request_us:10.0f} {row.token_us:9.2f} {row.events_per_token:15.2f}"
        )
    if args.json is not None:
        environment = describe_environment()
        write_json(args.json, {"environment": environment, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
