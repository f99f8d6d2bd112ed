"""Sends the requests of a benchmark from this process, or from several if one is too slow.

With several processes, each child reads its share of the requests from standard input, reports that
it is ready, receives the common start time, and returns its records one by one. The clocks agree:
`time.perf_counter()` is the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import uvloop

from headrace.bench.backends import BACKENDS, HttpTarget, Wire
from headrace.bench.load import OnDone, drive
from headrace.bench.record import BenchRequest, RequestRecord
from headrace.http_stream import HttpClient
from runtime.errors import HeadraceError
from runtime.ipc.process import watch_parent
from runtime.ipc.spawn import child_environment

_START_DELAY_S = 0.1
_LENGTH_BYTES = 4


class ClientJob(msgspec.Struct, kw_only=True):
    """The data that a client process needs to send its share of the requests.

    Attributes:
        requests: for each request its index, its time in seconds after the start, and the request.
    """

    url: str
    backend: str
    headers: dict[str, str] = {}
    wire: Wire = Wire()
    timeout_s: float
    max_concurrency: int | None = None
    requests: list[tuple[int, float, BenchRequest]] = []


def make_target(job: ClientJob) -> HttpTarget:
    """Return the target that sends requests to the job's server."""
    client = HttpClient(job.url, job.headers, job.timeout_s)
    return HttpTarget(client, BACKENDS[job.backend](), job.wire)


async def send_all(
    job: ClientJob, num_processes: int, on_done: OnDone | None = None
) -> list[RequestRecord]:
    """Send the job's requests from `num_processes` processes.

    Returns:
        One record for each request, in the order of the requests.

    Raises:
        HeadraceError: a client process died.
    """
    if num_processes <= 1:
        target = make_target(job)
        try:
            return await drive(
                job.requests, target, max_concurrency=job.max_concurrency, on_done=on_done
            )
        finally:
            target.client.close()
    shares = [_share(job, which, num_processes) for which in range(num_processes)]
    children = [await _start(share) for share in shares if share.requests]
    try:
        for child in children:
            await _read_frame(child)
        start = msgspec.msgpack.encode(time.perf_counter() + _START_DELAY_S)
        for child in children:
            _write_frame(child, start)
        parts = await asyncio.gather(*(_collect(child, on_done) for child in children))
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
            await child.wait()
    return sorted((record for part in parts for record in part), key=lambda record: record.index)


def _share(job: ClientJob, which: int, num_processes: int) -> ClientJob:
    limit = job.max_concurrency
    if limit is not None:
        # If the limit cannot be divided evenly, the first processes get one more. Each gets at
        # least one.
        limit = max(1, limit // num_processes + (which < limit % num_processes))
    requests = job.requests[which::num_processes]
    return msgspec.structs.replace(job, max_concurrency=limit, requests=requests)


async def _start(job: ClientJob) -> asyncio.subprocess.Process:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "headrace.bench.clients"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
        # The child must not get a terminal's Ctrl-C; the first process gets it and ends the child.
        start_new_session=True,
    )
    _write_frame(child, msgspec.msgpack.encode(job))
    return child


async def _collect(
    child: asyncio.subprocess.Process, on_done: OnDone | None
) -> list[RequestRecord]:
    decoder = msgspec.msgpack.Decoder(RequestRecord)
    records = []
    while frame := await _read_frame(child):
        record = decoder.decode(frame)
        records.append(record)
        if on_done is not None:
            on_done(record)
    return records


def _write_frame(child: asyncio.subprocess.Process, payload: bytes) -> None:
    assert child.stdin is not None
    child.stdin.write(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)


async def _read_frame(child: asyncio.subprocess.Process) -> bytes:
    assert child.stdout is not None
    try:
        size = int.from_bytes(await child.stdout.readexactly(_LENGTH_BYTES), "little")
        return await child.stdout.readexactly(size)
    except asyncio.IncompleteReadError:
        raise HeadraceError("A client process ended before its requests did.") from None


def main() -> None:
    """Run a child process: read its job, send its requests and write their records."""

    def read() -> bytes:
        size = int.from_bytes(sys.stdin.buffer.read(_LENGTH_BYTES), "little")
        return sys.stdin.buffer.read(size)

    def write(payload: bytes) -> None:
        sys.stdout.buffer.write(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)
        # Flush each record, because a buffered record is lost when the first process ends this one.
        sys.stdout.buffer.flush()

    async def run() -> list[RequestRecord]:
        job = msgspec.msgpack.decode(read(), type=ClientJob)
        target = make_target(job)
        write(b"ready")
        start = msgspec.msgpack.decode(read(), type=float)
        watch_parent()
        return await drive(
            job.requests,
            target,
            start=start,
            max_concurrency=job.max_concurrency,
            on_done=lambda record: write(msgspec.msgpack.encode(record)),
        )

    uvloop.run(run())
    # An empty frame tells the first process that all records were sent.
    write(b"")


if __name__ == "__main__":
    main()
