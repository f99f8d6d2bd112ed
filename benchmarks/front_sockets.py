"""Measures the CPU time of the front and the detokenizer, with sockets, HTTP and messages.

    python -m benchmarks.front_sockets [--streams 512] [--tokens 40] [--json out.json]

The front is this process: uvicorn with the server's own protocol, the whole application with its
access log, the engine's client and its sockets. The detokenizer is the server's. A worker without a
model answers immediately (`benchmarks.front_peers`). HTTP clients are a separate process. Worker
and clients are not measured. Figures are microseconds of processor time of all threads of the
process, the best of `--repeat` runs:

- a whole answer of one token on a persistent connection, `--connections` at a time;
- a stream of one token, `--streams` opened at once, each on its own connection;
- a further token of each of these streams, in the front and in the detokenizer.

The last line is the time of garbage collections in the front, with the server's settings, or with
Python's defaults under `--no-settle`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import random
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import uvicorn
import uvloop
import zmq

from benchmarks.front_peers import Done, Wave
from headrace.bench.environment import describe_environment, write_json
from runtime.client.admission import EngineLimits
from runtime.client.client import EngineClient
from runtime.config.options import DetokenizerConfig
from runtime.ipc.logging import configure_logging
from runtime.ipc.messages import DetokenizerReady, FrontInbound, TextDeltas
from runtime.ipc.process import Child
from runtime.ipc.shared_state import SHARED_STATE_FILE, SharedState
from runtime.ipc.transport import AsyncInbox, Outbox, front_address, scheduler_address
from server.connection_limit import ConnectionLimit
from server.garbage import settle
from server.protocol import GuardedProtocol
from tests.support.fake_server import FakeServer
from tests.support.tiny_tokenizers import KINDS

VOCAB_SIZE = 150_000
# The headers that OpenAI's client library sends with each request.
_HEADERS = (
    "host: 127.0.0.1:30000\r\naccept: application/json\r\naccept-encoding: gzip, deflate\r\n"
    "connection: keep-alive\r\ncontent-type: application/json\r\nauthorization: Bearer none\r\n"
    "user-agent: OpenAI/Python 2.8.0\r\nx-stainless-lang: python\r\nx-stainless-async: false\r\n"
    "x-stainless-retry-count: 0\r\nx-stainless-read-timeout: 600\r\n"
)


@dataclass
class Row:
    """One line of the table; times are in microseconds."""

    path: str
    whole_us: float
    stream_us: float
    token_us: float
    detokenizer_us: float
    events_per_token: float


class Setup:
    """The front in this process, and the processes around it."""

    def __init__(self, clients: asyncio.subprocess.Process, detokenizer: Child) -> None:
        self._clients = clients
        self._detokenizer = detokenizer

    async def wave(self, wave: Wave) -> tuple[float, float, int]:
        """Run a wave.

        Return processor seconds of front and detokenizer, and the number of events.
        """
        assert self._clients.stdin is not None
        assert self._clients.stdout is not None
        begin, begin_there = time.process_time(), _process_time(self._detokenizer.pid)
        self._clients.stdin.write(msgspec.json.encode(wave) + b"\n")
        line = await self._clients.stdout.readline()
        done = msgspec.json.decode(line, type=Done)
        front_s = time.process_time() - begin
        return front_s, _process_time(self._detokenizer.pid) - begin_there, done.num_events


def _process_time(pid: int) -> float:
    # The clock id of another process, as in `clock_getcpuclockid`.
    return time.clock_gettime((~pid << 3) | 2)


async def _receive(client: EngineClient, inbox: AsyncInbox[FrontInbound]) -> None:
    while True:
        message = await inbox.receive()
        if isinstance(message, TextDeltas):
            client.on_deltas(message)


class Collections:
    """Records the seconds of each garbage collection while the context is open.

    Attributes:
        seconds: seconds of each collection.
    """

    def __init__(self, *, settled: bool) -> None:
        """Use the server's settings of garbage collection if `settled`, else Python's defaults."""
        self.seconds: list[float] = []
        self._settled = settled
        self._since = self._began = self._cpu_s = 0.0

    def __enter__(self) -> Collections:
        if self._settled:
            settle()
        else:
            gc.collect()
            gc.freeze()
        gc.callbacks.append(self._note)
        self._began = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self._cpu_s = time.process_time() - self._began
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:  # noqa: ARG002
        if phase == "start":
            self._since = time.perf_counter()
        else:
            self.seconds.append(time.perf_counter() - self._since)

    def __str__(self) -> str:
        return (
            f"collections: {sum(self.seconds):.2f} s of {self._cpu_s:.1f} s of processor time, "
            f"the longest {max(self.seconds, default=0.0) * 1e3:.1f} ms"
        )


@contextlib.asynccontextmanager
async def start(folder: Path, step_ms: float) -> AsyncIterator[Setup]:
    """Start the front and the processes around it, with their files in `folder`."""
    server = FakeServer(folder)
    client = server.context.client
    client.limits = EngineLimits(2**17, 2**24, VOCAB_SIZE)
    SharedState(folder / SHARED_STATE_FILE, create=True)
    KINDS["llama3"]().save(str(folder / "tokenizer.json"))
    context: zmq.Context[Any] = zmq.Context()
    inbox: AsyncInbox[FrontInbound] = AsyncInbox(context, front_address(folder), FrontInbound)
    detokenizer = Child(
        "detokenizer",
        DetokenizerConfig(
            run_folder=str(folder),
            generation=0,
            scheduler_generation=0,
            tokenizer_folder=str(folder),
            log_level="error",
        ),
        lambda _child, _code: None,
    )
    peers = [sys.executable, "-m", "benchmarks.front_peers"]
    worker = await asyncio.create_subprocess_exec(
        *peers, "worker", str(folder), "--step-ms", str(step_ms)
    )
    assert isinstance(await inbox.receive(), DetokenizerReady)
    outbox = Outbox(context, scheduler_address(folder, 0))
    client.links[0].connect(outbox.send)
    receiving = asyncio.create_task(_receive(client, inbox))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(
        server.app,
        http=cast("Any", partial(GuardedProtocol, limit=ConnectionLimit(10_000))),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
    )
    http = uvicorn.Server(config)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    clients = await asyncio.create_subprocess_exec(
        *peers, "clients", str(port), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Setup(clients, detokenizer)
    finally:
        clients.terminate()
        worker.terminate()
        await asyncio.gather(clients.wait(), worker.wait())
        http.should_exit = True
        await serving
        receiving.cancel()
        detokenizer.stop()
        outbox.close()
        inbox.close()
        context.term()


def wave_of(path: str, body: dict[str, Any], num_connections: int, num_rounds: int) -> Wave:
    text = msgspec.json.encode(body).decode()
    return Wave(f"POST {path} HTTP/1.1\r\n{_HEADERS}", text, num_connections, num_rounds)


async def measure(args: argparse.Namespace) -> tuple[list[Row], Collections]:
    with tempfile.TemporaryDirectory() as folder:
        async with start(Path(folder), args.step_ms) as setup:
            with Collections(settled=args.settle) as collections:
                rows = [await _measure_path(setup, path, args) for path in args.path]
    return rows, collections


async def _measure_path(setup: Setup, path: str, args: argparse.Namespace) -> Row:
    whole = wave_of(
        path, body_of(path, args.prompt, 1, stream=False), args.connections, args.rounds
    )
    first = wave_of(path, body_of(path, args.prompt, 1, stream=True), args.streams, 1)
    body = body_of(path, args.prompt, 1 + args.tokens, stream=True)
    stream = wave_of(path, body, args.streams, 1)
    best: list[tuple[float, float, int]] = []
    for wave in (whole, first, stream):
        await setup.wave(wave)
        runs = [await setup.wave(wave) for _ in range(args.repeat)]
        front_s, detokenizer_s, num_events = zip(*runs, strict=True)
        best.append((min(front_s), min(detokenizer_s), max(num_events)))
    (whole_s, _, _), (first_s, first_there_s, num_first), (stream_s, there_s, num_events) = best
    num_tokens = args.streams * args.tokens
    return Row(
        path,
        whole_s / args.connections / args.rounds * 1e6,
        first_s / args.streams * 1e6,
        (stream_s - first_s) / num_tokens * 1e6,
        (there_s - first_there_s) / num_tokens * 1e6,
        (num_events - num_first) / num_tokens,
    )


def body_of(path: str, prompt: int, num_tokens: int, *, stream: bool) -> dict[str, Any]:
    draw = random.Random(0)
    ids = [draw.randrange(VOCAB_SIZE) for _ in range(prompt)]
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    question = [{"role": "user", "content": "x" * prompt}]
    limits = {"model": "fake", "temperature": 0, "max_tokens": num_tokens, "stream": stream}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"input_ids": ids, "sampling_params": sampling, "stream": stream},
        "/v1/completions": {"prompt": ids, **limits},
        "/v1/chat/completions": {"messages": question, **limits},
    }
    return bodies[path]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    paths = ["/generate", "/v1/completions", "/v1/chat/completions"]
    parser.add_argument("--path", nargs="*", default=paths)
    parser.add_argument(
        "--prompt", type=int, default=512, help="token ids, or characters of a chat"
    )
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=40, help="further ones of each stream")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=16, help="whole answers on each connection")
    parser.add_argument(
        "--step-ms", type=float, default=30.0, help="between two tokens of a stream"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--settle", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    configure_logging(args.log_level, "front")
    rows, collections = uvloop.run(measure(args))
    print(
        f"{'route':22} {'whole us':>9} {'stream us':>10} {'token us':>9} {'detokenizer us':>15}"
        f" {'events a token':>15}"
    )
    for row in rows:
        print(
            f"{row.path:22} {row.whole_us:9.0f} {row.stream_us:10.0f} {row.token_us:9.2f}"
            f" {row.detokenizer_us:15.2f} {row.events_per_token:15.2f}"
        )
    print(collections)
    if args.json is not None:
        environment = describe_environment()
        write_json(args.json, {"environment": environment, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
