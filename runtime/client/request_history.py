"""Keeps the times of the last requests: those of the front process joined with the worker's."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import chain
from typing import Literal

from runtime.ipc.messages import BeginTimes, GenerateRequest
from runtime.ipc.time_messages import WorkerTimes
from runtime.requests.arrival import ARRIVAL, Arrival

MAX_KEPT = 10_000
# Number of tokens that are kept before and after the first token of a prompt that is not cached.
SHOWN_TOKENS = 16
_ID_BYTES = 4
# Number of ended requests whose prompts are kept because the worker has not reported its times yet.
_MAX_UNTOLD = 256
# The most characters of system messages that are kept.
_MAX_SYSTEM_CHARS = 2**22

# Why an admitted request is not sent to a scheduler yet. `disk`: weights are updated from files.
Hold = Literal["grammar", "process", "restart", "disk", "update", "session", "pause"]


class RequestTrace:
    """The times of one request, as `time.monotonic()`; 0 for an event that has not happened.

    Attributes:
        name: the tenant, and the request's `rid`.
        arrival: times of the HTTP request, if there was one.
        request_id: the engine's id; it changes when another process takes the request over.
        admitted_at: when the client took the request.
        held_s: seconds that the request was held before it was sent, by reason.
        sent_at: when the request was last sent to a scheduler.
        lost_s: seconds that the request spent in processes that died.
        num_resumes: number of processes that died while they ran the request.
        first_token_at: when the detokenizer got the first token.
        first_at, finished_at: when the first and the last text arrived here.
        outcome: how the request ended; empty while it runs.
        worker: times in the last worker process; `None` until it has reported them.
        break_ids: int32 bytes, tokens around the first token of the prompt that was not cached.
        num_before: how many of those tokens come before it.
        system: key of the request's system message in `RequestHistory`; 0 for none.
        system_text: text of the system message, kept until the worker has reported its times.
    """

    __slots__ = (
        *("_held", "_ids", "admitted_at", "arrival", "break_ids", "finished_at", "first_at"),
        *("first_token_at", "held_s", "lost_s", "name", "num_before", "num_images"),
        *("num_output", "num_prompt", "num_resumes", "outcome", "request_id", "sent_at"),
        *("system", "system_text", "worker"),
    )

    def __init__(self, request: GenerateRequest, name: tuple[str, str], num_prompt: int) -> None:
        """Begin the trace of a request that the client takes."""
        self.name = name
        self.arrival: Arrival | None = ARRIVAL.get()
        self.request_id = request.request_id
        self.admitted_at = request.arrival
        self.num_prompt = num_prompt
        self.num_output = 0
        self.num_images = len(request.spec.images)
        self.held_s: dict[Hold, float] = {}
        self._held: tuple[Hold, float] | None = None
        self.sent_at = self.first_token_at = self.first_at = self.finished_at = 0.0
        self.lost_s = 0.0
        self.num_resumes = 0
        self.outcome = ""
        self.worker: WorkerTimes | None = None
        # With embeddings, the ids are only placeholders.
        self._ids = b"" if request.spec.input_embeds else request.input_ids
        self.break_ids = b""
        self.num_before = 0
        self.system = 0
        # The text is copied here, because the arrival drops its own copy after the response.
        self.system_text = "" if self.arrival is None else self.arrival.system

    def hold(self, reason: Hold) -> None:
        """Record that the request waits from now on because of `reason`."""
        self._let_go()
        self._held = reason, time.monotonic()

    def _let_go(self) -> None:
        if self._held is not None:
            reason, since = self._held
            self.held_s[reason] = self.held_s.get(reason, 0.0) + time.monotonic() - since
            self._held = None

    def sent(self) -> None:
        """Record that the request is sent to a scheduler now."""
        self._let_go()
        self.sent_at = time.monotonic()

    def resume(self, request_id: int) -> None:
        """Record that the request's process died, and that it goes on under the id `request_id`."""
        self.request_id = request_id
        self.num_resumes += 1
        self.lost_s += time.monotonic() - self.sent_at
        self.hold("restart")

    def began(self, times: BeginTimes) -> None:
        """Record that the first text has arrived."""
        self.first_at = self.first_at or time.monotonic()
        self.first_token_at = self.first_token_at or times.first_token_at

    def end(self, output_ids: bytes | bytearray) -> None:
        """Record that the request has ended; `output_ids` are its output tokens, int32 bytes."""
        self._let_go()
        self.num_output = len(output_ids) // _ID_BYTES
        self.finished_at = self.finished_at or time.monotonic()

    def tell(self, times: WorkerTimes) -> None:
        """Store the times that the worker reports, and the tokens around the first uncached one."""
        self.worker = times
        if times.prefix is not None:
            first = max(times.prefix.index - SHOWN_TOKENS, 0)
            end = times.prefix.index + SHOWN_TOKENS
            self.num_before = times.prefix.index - first
            self.break_ids = self._ids[_ID_BYTES * first : _ID_BYTES * end]

    def forget_prompt(self) -> None:
        """Free the prompt's tokens and its system message."""
        self._ids, self.system_text = b"", ""


class RequestHistory:
    """Traces of the requests that run, and of the last `MAX_KEPT` that have ended."""

    def __init__(self) -> None:
        """Start empty."""
        self._running: dict[int, RequestTrace] = {}
        self._ended: OrderedDict[int, RequestTrace] = OrderedDict()
        self._untold: deque[RequestTrace] = deque()
        self._systems: OrderedDict[int, str] = OrderedDict()
        self._num_system_chars = 0

    def begin(self, trace: RequestTrace) -> None:
        """Add a request that the client has taken. Requests that were not added are not kept."""
        self._running[trace.request_id] = trace

    def rename(self, trace: RequestTrace, request_id: int) -> None:
        """Record that a request goes on under another id, because its process died."""
        is_kept = self._running.pop(trace.request_id, None) is not None
        trace.resume(request_id)
        if is_kept:
            self._running[request_id] = trace

    def end(self, trace: RequestTrace, output_ids: bytes | bytearray) -> None:
        """Record that a request has ended; `output_ids` are its output tokens, int32 bytes."""
        trace.end(output_ids)
        if self._running.pop(trace.request_id, None) is None:
            return
        self._ended[trace.request_id] = trace
        if len(self._ended) > MAX_KEPT:
            self._ended.popitem(last=False)
        if trace.worker is not None:
            return
        self._untold.append(trace)
        if len(self._untold) > _MAX_UNTOLD:
            self._untold.popleft().forget_prompt()

    def on_times(self, ended: Iterable[WorkerTimes]) -> None:
        """Store the times that a worker reports in the traces of their requests."""
        for times in ended:
            trace = self._running.get(times.request_id) or self._ended.get(times.request_id)
            if trace is not None:
                trace.tell(times)
                self._keep_system(trace)
                trace.forget_prompt()

    def _keep_system(self, trace: RequestTrace) -> None:
        """Keep a request's system message if the first uncached token may lie inside it."""
        worker, text = trace.worker, trace.system_text
        if worker is None or worker.prefix is None or not text:
            return
        # The break is inside the message only if its position is below this bound: a token has at
        # least one character, and a template writes a few tokens before the message.
        if not worker.prefix.differs or worker.prefix.index > len(text) + SHOWN_TOKENS:
            return
        trace.system = hash(text)
        if trace.system not in self._systems:
            self._num_system_chars += len(text)
        self._systems[trace.system] = text
        self._systems.move_to_end(trace.system)
        while self._num_system_chars > _MAX_SYSTEM_CHARS:
            _, oldest = self._systems.popitem(last=False)
            self._num_system_chars -= len(oldest)

    def system_of(self, trace: RequestTrace) -> str:
        """Return the system message of a request; an empty string if it is not kept."""
        return self._systems.get(trace.system, "")

    def find(self, name: str, tenant: str | None) -> list[RequestTrace]:
        """Return the trace of the newest request of that name.

        A request with several samples has a trace for each sample, in order.

        Args:
            name: a `rid`, the `rid` of a batch, or the id of an HTTP request.
            tenant: the tenant whose requests are searched; `None` for all tenants.
        """
        found: list[RequestTrace] = []
        for trace in chain(reversed(self._running.values()), reversed(self._ended.values())):
            if (tenant is None or trace.name[0] == tenant) and _is_called(trace, name):
                if found and found[-1].arrival is not trace.arrival:
                    break
                found.append(trace)
                if trace.arrival is None:
                    break
        return found[::-1]

    def rid_of(self, request_id: int, tenant: str | None) -> str | None:
        """Return the `rid` (the caller's name) of a request, given the engine's number for it.

        Returns `None` if the request is not in the history or belongs to another tenant. With
        `tenant=None`, requests of all tenants are visible.
        """
        trace = self._running.get(request_id) or self._ended.get(request_id)
        if trace is None or tenant not in (None, trace.name[0]):
            return None
        return trace.name[1]


def _is_called(trace: RequestTrace, name: str) -> bool:
    rid = trace.name[1]
    if rid == name or (trace.arrival is not None and trace.arrival.http_id == name):
        return True
    first, _, index = rid.rpartition("_")
    return first == name and index.isdigit()
