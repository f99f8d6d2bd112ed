"""Runs batches: answers their lines while the engine has room beside other requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

from openai_api.batches.batch_lines import BadLine, check_line
from openai_api.batches.batch_store import OVER, BatchRecord, BatchStore, LineError, Status
from openai_api.batches.file_store import FileStore
from runtime.client.tenant import TENANT
from runtime.errors import InvalidRequest
from runtime.service.context import ServiceContext

logger = logging.getLogger(__name__)

Answer = Callable[[str, bytes], Awaitable[dict[str, Any]]]

MAX_LINES = 50_000
# The most unfinished batches of a tenant.
MAX_UNFINISHED = 100
# The limits of a line. A line is decoded in one call, on a thread that holds the GIL meanwhile: two
# milliseconds for each MiB of text. A MiB of numbers would take seconds, so the number of values is
# limited too.
MAX_LINE_BYTES = 2**24
MAX_VALUES = 2**19
_MAX_ERRORS = 100
_READ_LINES = 64
# Batch files use at most one in this many places of the replicas' running batches, so that other
# requests find room at once.
_ROWS_PER_LINE = 4
# Priority of a batch's requests, if priorities are enabled: lower than the default of others.
_PRIORITY = -1
# The most attempts at a line. If the engine dies at each attempt, the line may be the cause.
_MAX_ATTEMPTS = 4
_POLL_S = 0.05
_WATCH_S = 0.25
_UNAVAILABLE = 503


@dataclass(frozen=True)
class _Line:
    """A request of a checked input file.

    Attributes:
        number: the line's number, from 0, without blank lines.
        custom_id: the client's name for the request.
        url: the request's path.
        body: the request's body, JSON.
    """

    number: int
    custom_id: str
    url: str
    body: bytes


class BatchRunner:
    """Runs all unfinished batches, including those that an earlier server left unfinished.

    Attributes:
        running: records of the batches in progress, by id.
        has_begun: set once `running` includes the batches from before the start, or at shutdown.
    """

    _answer_line: Answer

    def __init__(
        self, batches: BatchStore, files: FileStore, now: Callable[[], float] = time.time
    ) -> None:
        """Prepare to run the batches of the store `batches`, whose input is in `files`."""
        self.running: dict[str, BatchRecord] = {}
        self.has_begun = asyncio.Event()
        self._batches = batches
        self._files = files
        self._now = now
        self._new: asyncio.Queue[BatchRecord] = asyncio.Queue()
        self._work: dict[str, asyncio.Task[None]] = {}
        self._num_lines = 0
        # For each tenant, the number of batches that are being created.
        self._created: Counter[str] = Counter()

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Reserve room for a new batch of the current tenant, for the duration of the block.

        It must be entered before the first await of a request, so that simultaneous requests cannot
        exceed the limit.

        Raises:
            InvalidRequest: the tenant has reached the limit of unfinished batches.
        """
        tenant = TENANT.get()
        num_running = sum(record.tenant == tenant for record in self.running.values())
        if num_running + self._created[tenant] >= MAX_UNFINISHED:
            raise InvalidRequest(f"There are {MAX_UNFINISHED} unfinished batches already.")
        self._created[tenant] += 1
        try:
            yield
        finally:
            self._created[tenant] -= 1

    def add(self, record: BatchRecord) -> None:
        """Run a new batch, which is stored already."""
        self.running[record.id] = record
        self._new.put_nowait(record)

    async def cancel(self, record: BatchRecord) -> None:
        """Cancel an unfinished batch: its remaining lines are not answered."""
        if record.status == "cancelling":
            return
        await self._begin(record, "cancelling")
        if (work := self._work.get(record.id)) is not None:
            work.cancel()

    async def run(self, context: ServiceContext, answer: Answer) -> None:
        """Run batches until the server shuts down.

        Args:
            context: the server's context.
            answer: computes a request, given its path and JSON body; returns the object `response`
                of the output line.
        """
        self._answer_line = answer
        work = asyncio.create_task(self._run_all(context))
        try:
            while not context.lifecycle.draining:
                await asyncio.wait([work], timeout=_WATCH_S)
                if work.done():
                    work.result()
        finally:
            # Lines that are interrupted here are answered after the next start.
            work.cancel()
            await asyncio.wait([work])
            self.has_begun.set()
        await asyncio.Event().wait()

    async def _run_all(self, context: ServiceContext) -> None:
        for record in await self._batches.unfinished():
            if record.id not in self.running:
                self.add(record)
        self.has_begun.set()
        worker = context.status.worker
        while worker is None or not context.client.ready:
            await asyncio.sleep(_POLL_S)
            worker = context.status.worker
        rows = worker.max_running_requests * len(context.status.replicas)
        slots = asyncio.Semaphore(max(rows // _ROWS_PER_LINE, 1))
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._process(await self._new.get(), slots, context))

    async def _process(
        self, record: BatchRecord, slots: asyncio.Semaphore, context: ServiceContext
    ) -> None:
        try:
            if record.status == "validating":
                await self._validate(record)
            if record.status == "in_progress":
                await self._answer_in_time(record, slots, context)
            if record.status not in OVER:
                await self._finish(record)
        except Exception:
            logger.exception("%s failed", record.id)
            await self._fail(record)
        finally:
            self.running.pop(record.id, None)

    async def _fail(self, record: BatchRecord) -> None:
        record.errors = [LineError("internal_error", "The server failed; its log says more.")]
        try:
            await self._begin(record, "failed")
        except Exception:
            # The disk may be full. Other batches and the server must go on.
            logger.exception("%s is left to the next server", record.id)

    async def _begin(self, record: BatchRecord, status: Status) -> None:
        record.status = status
        record.times[status] = int(self._now())
        await self._batches.put(record)

    # ---- the input ----

    async def _validate(self, record: BatchRecord) -> None:
        try:
            content = self._files.path(record.input_file_id).open("rb")
        except OSError:
            record.errors = [LineError("missing_file", "The input file is no longer there.")]
        else:
            with content:
                errors, num_lines = await asyncio.to_thread(_check_input, content, record.endpoint)
            record.errors, record.total = errors, num_lines
        if record.status != "cancelling":
            await self._begin(record, "failed" if record.errors else "in_progress")

    # ---- the lines ----

    async def _answer_in_time(
        self, record: BatchRecord, slots: asyncio.Semaphore, context: ServiceContext
    ) -> None:
        work = asyncio.create_task(self._answer_lines(record, slots, context))
        self._work[record.id] = work
        try:
            await asyncio.wait([work], timeout=max(record.expires_at - self._now(), 0))
            if not work.done():
                record.outcome = "expired"
        finally:
            work.cancel()
            await asyncio.wait([work])
            del self._work[record.id]
        if not work.cancelled():
            work.result()
        if record.outcome == "expired":
            await self._give_up(record)

    async def _answer_lines(
        self, record: BatchRecord, slots: asyncio.Semaphore, context: ServiceContext
    ) -> None:
        TENANT.set(record.tenant)
        async with asyncio.TaskGroup() as group:
            async for line in self._missing(record):
                await self._wait_for_room(context)
                await slots.acquire()
                self._num_lines += 1
                work = group.create_task(self._answer(record, line, context))
                work.add_done_callback(lambda _: self._end_line(slots))

    def _end_line(self, slots: asyncio.Semaphore) -> None:
        self._num_lines -= 1
        slots.release()

    async def _wait_for_room(self, context: ServiceContext) -> None:
        """Wait until the engine is ready and no request waits in its queue."""
        client, status = context.client, context.status
        if client.num_in_flight > self._num_lines:
            # Other requests run. The newest ones appear in the status only after a step.
            await asyncio.sleep(_POLL_S)
        while not client.ready or not client.accepting or status.total("num_queue_reqs"):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def _missing(self, record: BatchRecord) -> AsyncIterator[_Line]:
        answered = await self._batches.answered(record.id)
        with self._files.path(record.input_file_id).open("rb") as content:
            lines = _lines(content, answered)
            while some := await asyncio.to_thread(_take, lines):
                for line in some:
                    yield line

    async def _answer(self, record: BatchRecord, line: _Line, context: ServiceContext) -> None:
        response = await self._answer_line(line.url, line.body)
        for _ in range(_MAX_ATTEMPTS - 1):
            if response["status_code"] != _UNAVAILABLE:
                break
            await asyncio.sleep(1)
            await self._wait_for_room(context)
            response = await self._answer_line(line.url, line.body)
        await self._keep(record, line, response, None)

    async def _keep(
        self,
        record: BatchRecord,
        line: _Line,
        response: dict[str, Any] | None,
        error: dict[str, Any] | None,
    ) -> None:
        kept = {
            "id": f"batch_req_{record.id.removeprefix('batch_')}_{line.number}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
        is_good = response is not None and response["status_code"] == 200
        await self._batches.add_answer(record.id, line.number, kept, is_good=is_good)

    async def _give_up(self, record: BatchRecord) -> None:
        error = {
            "code": "batch_expired",
            "message": "The request was not answered within the completion window.",
        }
        async for line in self._missing(record):
            await self._keep(record, line, None, error)

    # ---- the end ----

    async def _finish(self, record: BatchRecord) -> None:
        if record.status == "cancelling":
            record.outcome = "cancelled"
        elif record.status != "finalizing":
            await self._begin(record, "finalizing")
        await self._batches.write_files(record, int(self._now()))
        await self._begin(record, record.outcome)
        await self._batches.clean()


def _lines(content: BinaryIO, answered: Container[int]) -> Iterator[_Line]:
    """Yield the lines of a checked input file that have no answer yet. It runs on a thread."""
    requests = (raw for raw in content if raw.strip())
    for number, raw in enumerate(requests):
        if number in answered:
            continue
        request = orjson.loads(raw)
        url, body = check_line(request)
        body.setdefault("priority", _PRIORITY)
        yield _Line(number, request["custom_id"], url, orjson.dumps(body))


def _take(lines: Iterator[_Line]) -> list[_Line]:
    return list(itertools.islice(lines, _READ_LINES))


def _bounded_lines(content: BinaryIO) -> Iterator[bytes]:
    """Read lines; a line over the limit is cut to one byte more than the limit."""
    while raw := content.readline(MAX_LINE_BYTES + 1):
        yield raw
        while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            raw = content.readline(MAX_LINE_BYTES + 1)


def _check_input(content: BinaryIO, endpoint: str) -> tuple[list[LineError], int]:
    """Return the errors of an input file and its number of requests.

    This function reads the whole file, so do not call it on the event loop.
    """
    errors: list[LineError] = []
    names: set[str] = set()
    num_lines = 0
    for at, raw in enumerate(_bounded_lines(content), 1):
        if not raw.strip():
            continue
        num_lines += 1
        try:
            _check_input_line(raw, endpoint, names)
        except BadLine as error:
            errors.append(LineError(error.code, str(error), at, error.param))
        if len(errors) == _MAX_ERRORS:
            return errors, num_lines
        if num_lines > MAX_LINES:
            text = f"A batch may have at most {MAX_LINES} requests."
            return [LineError("too_many_requests", text)], num_lines
    if not num_lines:
        errors.append(LineError("empty_file", "The input file has no requests."))
    return errors, num_lines


def _check_input_line(raw: bytes, endpoint: str, names: set[str]) -> None:
    request: Any = None
    if len(raw) > MAX_LINE_BYTES:
        raise BadLine("line_too_long", f"A line may have at most {MAX_LINE_BYTES} bytes.")
    if raw.count(b",") >= MAX_VALUES:
        raise BadLine("line_too_long", f"A line may have at most {MAX_VALUES} values.")
    with contextlib.suppress(orjson.JSONDecodeError):
        request = orjson.loads(raw)
    if not isinstance(request, dict):
        raise BadLine("invalid_json_line", "This line is not a JSON object.")
    url, _ = check_line(request)
    if url != endpoint:
        raise BadLine("mismatched_url", f"url must be {endpoint}, as the batch's endpoint.", "url")
    if request["custom_id"] in names:
        raise BadLine("duplicate_custom_id", "custom_id names an earlier line.", "custom_id")
    names.add(request["custom_id"])
