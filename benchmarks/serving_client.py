"""Measures the client's cost in `bench serving`: how many events per second it can read.

    python -m benchmarks.serving_client [--streams 64] [--tokens 256] [--processes 1]

A bare server in a separate process sends answers that were encoded in advance. Events of the native
API are cumulative: each has all ids so far. The client's CPU time per event limits what it can
measure. For example, at 33 us per event one process can follow 30,000 tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import time

import uvloop

from headrace.bench.backends import Wire
from headrace.bench.clients import ClientJob, send_all
from headrace.bench.record import BenchRequest, summarize

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _chunks(backend: str, num_tokens: int) -> list[bytes]:
    chunks = []
    for count in range(1, num_tokens + 1):
        is_last = count == num_tokens
        if backend == "headrace":
            event = {
                "text": " word" * count,
                "output_ids": list(range(100000, 100000 + count)),
                "meta_info": {
                    "id": "0" * 32,
                    "finish_reason": {"type": "length", "length": count} if is_last else None,
                    "prompt_tokens": 512,
                    "completion_tokens": count,
                    "cached_tokens": 0,
                },
            }
        else:
            choice = {"index": 0, "text": " word", "finish_reason": "length" if is_last else None}
            event = {"id": "cmpl-0", "object": "text_completion", "choices": [choice]}
        data = f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
        chunks.append(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    return chunks


async def _serve(backend: str, num_tokens: int) -> None:
    chunks = _chunks(backend, num_tokens)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
                writer.write(_HEAD)
                for chunk in chunks:
                    writer.write(chunk)
                    await writer.drain()
                    # Every stream gets its token before any stream gets the next one, as in a
                    # batch.
                    await asyncio.sleep(0)
                writer.write(_END)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Print one line for each API."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(_serve(options.serve, options.tokens))
        return
    for backend in ("headrace", "openai-completions"):
        command = [sys.executable, "-m", "benchmarks.serving_client", "--serve", backend]
        command += ["--tokens", str(options.tokens)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            _measure(backend, int(server.stdout.readline()), options)
        finally:
            server.kill()
            # The server's end is awaited only after the figures are read, because its CPU time
            # would be added to the clients'.
            server.wait()


def _measure(backend: str, port: int, options: argparse.Namespace) -> None:
    request = BenchRequest(input_ids=list(range(512)), output_len=options.tokens)
    job = ClientJob(
        url=f"http://127.0.0.1:{port}",
        backend=backend,
        wire=Wire("model"),
        timeout_s=120.0,
        max_concurrency=options.streams,
        requests=[(index, 0.0, request) for index in range(options.requests)],
    )
    before, started = _cpu_s(), time.perf_counter()
    records = uvloop.run(send_all(job, options.processes))
    seconds, cpu_s = time.perf_counter() - started, _cpu_s() - before
    summary = summarize(records)
    assert not summary["num_failed"], summary["errors"]
    num_events = sum(len(record.event_times) for record in records)
    print(
        f"{backend:20} {num_events} events in {seconds:.2f} s: {num_events / seconds:.0f}/s, "
        f"{cpu_s / num_events * 1e6:.1f} us of CPU an event",
        flush=True,
    )


if __name__ == "__main__":
    main()
