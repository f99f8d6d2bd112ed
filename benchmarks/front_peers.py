"""The processes around a measured front: a worker that answers immediately, and clients.

    python -m benchmarks.front_peers worker RUN_FOLDER [--step-ms 20]
    python -m benchmarks.front_peers clients PORT

The worker answers a request with its first token immediately, and sends one more token to all
running requests every `--step-ms`. The clients read one `Wave` per line from standard input, and
write a `Done` for each to standard output. `benchmarks.front_sockets` starts both processes.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop
import zmq

from runtime.ipc.messages import (
    FinishReason,
    GenerateRequest,
    SchedulerInbound,
    StreamEnd,
    StreamStart,
    TokenDeltas,
)
from runtime.ipc.transport import Inbox, Outbox, detokenizer_address, scheduler_address

# In any byte-level vocabulary these tokens are plain characters.
_TOKENS = range(40, 80)


class Wave(msgspec.Struct):
    """Requests on several connections at once, one after the other on each connection."""

    head: str
    body: str
    num_connections: int
    num_rounds: int


class Done(msgspec.Struct):
    """The result of a wave: the number of events of its streams, including end markers."""

    num_events: int


class Worker:
    """Generates tokens for every request without a model."""

    def __init__(self, outbox: Outbox) -> None:
        """Send tokens to `outbox`; there are no requests yet."""
        self._outbox = outbox
        # Remaining tokens, by request.
        self._left: dict[int, int] = {}
        self._tokens = itertools.cycle(_TOKENS)

    def begin(self, requests: list[GenerateRequest]) -> None:
        """Send the first token of each request."""
        starts = []
        for request in requests:
            spec, sampling = request.spec, request.spec.sampling
            self._left[request.request_id] = sampling.max_new_tokens or 1
            now = time.monotonic()
            starts.append(
                StreamStart(
                    request.request_id,
                    spec.stream,
                    sampling.stop,
                    sampling.skip_special_tokens,
                    sampling.spaces_between_special_tokens,
                    sampling.no_stop_trim,
                    1,
                    request.input_ids[-16:],
                    admitted_at=now,
                )
            )
        self._send([request.request_id for request in requests], starts)

    def step(self) -> None:
        """Send one token to each running request."""
        if self._left:
            self._send(list(self._left), [])

    def _send(self, request_ids: list[int], starts: list[StreamStart]) -> None:
        ends = []
        for request_id in request_ids:
            self._left[request_id] -= 1
            if not self._left[request_id]:
                del self._left[request_id]
                ends.append(StreamEnd(request_id, FinishReason("length", length=1)))
        ids = array.array("i", itertools.islice(self._tokens, len(request_ids)))
        counts, cached = [1] * len(request_ids), [0] * len(starts)
        self._outbox.send(TokenDeltas(starts, cached, request_ids, counts, ids.tobytes(), ends))


def run_worker(run_folder: Path, step_s: float) -> None:
    """Serve requests until the process is terminated."""
    context: zmq.Context[Any] = zmq.Context()
    inbox: Inbox[SchedulerInbound] = Inbox(
        context, scheduler_address(run_folder, 0), SchedulerInbound
    )
    outbox = Outbox(context, detokenizer_address(run_folder, 0))
    worker = Worker(outbox)
    next_step = time.monotonic() + step_s
    while True:
        inbox.wait(max(next_step - time.monotonic(), 0))
        new = [each for each in inbox.drain() if isinstance(each, GenerateRequest)]
        if new:
            worker.begin(new)
        if time.monotonic() >= next_step:
            worker.step()
            next_step = max(next_step + step_s, time.monotonic())


class _Connection(asyncio.Protocol):
    """Sends one request `num_rounds` times, each after the previous answer."""

    def __init__(self, wave: Wave) -> None:
        self._wave = wave
        body = wave.body.encode()
        head = f"{wave.head}content-length: {len(body)}\r\n\r\n".encode()
        self._request = head + body
        self._left = wave.num_rounds
        self._received = b""
        self.num_events = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transport is uvloop's, which has all methods of `asyncio.Transport`.
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def _ask(self) -> None:
        self._left -= 1
        self._received = b""
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ")
        self._received += data
        if not self._received.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(ValueError(self._received[:500].decode()))
        elif self._is_over():
            if self._left:
                self._ask()
            elif not self.done.done():
                self._transport.close()
                self.done.set_result(None)
        elif len(self._received) > 4096:
            # The head is parsed already. Of a stream only the end matters, so the rest is dropped.
            self._received = self._received[:1024] + self._received[-64:]

    def _is_over(self) -> bool:
        if self._received.endswith(b"\r\n0\r\n\r\n"):
            return True
        head, found, body = self._received.partition(b"\r\n\r\n")
        _, is_known, length = head.lower().partition(b"content-length: ")
        return bool(found and is_known) and len(body) == int(length.split(b"\r\n")[0])


async def _ask_all(port: int, wave: Wave) -> Done:
    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(lambda: _Connection(wave), "127.0.0.1", port)
        for _ in range(wave.num_connections)
    ]
    await asyncio.gather(*(connection.done for _, connection in opened))
    return Done(sum(connection.num_events for _, connection in opened))


def run_clients(port: int) -> None:
    """Run the waves from standard input until it ends."""
    decoder = msgspec.json.Decoder(Wave)
    for line in sys.stdin:
        done = uvloop.run(_ask_all(port, decoder.decode(line)))
        print(msgspec.json.encode(done).decode(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    worker = commands.add_parser("worker")
    worker.add_argument("run_folder", type=Path)
    worker.add_argument("--step-ms", type=float, default=20.0)
    clients = commands.add_parser("clients")
    clients.add_argument("port", type=int)
    args = parser.parse_args()
    if args.command == "worker":
        run_worker(args.run_folder, args.step_ms / 1000)
    else:
        run_clients(args.port)


if __name__ == "__main__":
    main()
