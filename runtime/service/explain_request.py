"""Explains how a request spent its time, what it waited for, and where its cached prefix ended.

All times are measured: `RequestTrace` holds those of the front process, `WorkerTimes` those of the
worker process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from runtime.client.request_history import Hold, RequestHistory, RequestTrace
from runtime.client.tenant import TENANT
from runtime.errors import HeadraceError
from runtime.ipc.time_messages import Wait, WorkerTimes
from runtime.requests.arrival import FrontWork
from runtime.service.context import ServiceContext

CauseName = Literal[
    "full pool",
    "full batch",
    "retraction",
    "long neighbor",
    "cold cache",
    "changed system line",
    "new prompt text",
    "slow reader",
    "slow sender",
    "large body",
    "grammar compilation",
    "large image",
    "restart",
    "slow disk",
    "weight update",
    "pause",
    "adapter slots",
    "shared prefix",
    "state slots",
    "files",
]
# A cause is listed if it took at least this share of the request's time, and at least `_LEAST_S`
# seconds.
_LEAST_SHARE = 0.05
_LEAST_S = 0.001
_TOLD_WITHIN_S = 1.0
_POLL_S = 0.01
# Number of tokens after the cache break that are searched in the system message; so many do not
# match by chance.
_FOLLOWING = 8

_WAITS = {
    Wait.STEP: "running step",
    Wait.PROMPTS: "step with other prompts",
    Wait.ROWS: "row of the batch",
    Wait.PAGES: "pages of the KV pool",
    Wait.PAUSE: "pause",
    Wait.ADAPTER: "adapter slot",
    Wait.SHARED: "shared prefix",
    Wait.STATES: "slots of recurrent states",
    Wait.FILES: "pages from files",
}

_HOLDS: dict[Hold, str] = {
    "grammar": "grammar",
    "process": "start of a worker",
    "restart": "start of another worker",
    "disk": "weights from files",
    "update": "weights from a trainer",
    "session": "weights from a trainer",
    "pause": "pause",
}


class UnknownRequest(HeadraceError):
    """No running or recent request of the tenant has the given name."""

    status_code = 404


class Stage(TypedDict):
    """A part of the request's time.

    Stages follow one another without a gap, so their times add up to the request's time. The times
    in `parts` are measured independently, so their sum may differ from `ms`.
    """

    name: str
    ms: float
    parts: dict[str, float]


class Cause(TypedDict):
    """A cause of delay, and how much time it took. Two causes may overlap in time."""

    name: CauseName
    ms: float
    text: str


class PromptChunk(TypedDict):
    """A chunk of the prompt that one step computed.

    `start` is its first token's position. `at_ms` is the time from the request's arrival to the
    planning of the step.
    """

    start: int
    tokens: int
    at_ms: float


class LeftCache(TypedDict):
    """The position of the prompt's first token that was not in the prefix cache.

    `kind` is `differs` if cached prompts continue with another token at this position. It is `new`
    if cached prompts end here, or if their pages from here on were evicted. `before` and `after`
    are the prompt's own text on either side of the position. `in_system` says whether the position
    is inside the system message.
    """

    index: int
    kind: Literal["differs", "new"]
    in_system: bool
    before: str
    after: str


class Explained(TypedDict):
    """The explanation of one sample.

    `outcome` is empty while the sample runs. `is_complete` is false until the worker has reported
    its times, which it does when the sample ends.
    """

    rid: str
    http_id: str
    outcome: str
    is_complete: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    images: int
    retractions: int
    resumes: int
    total_ms: float
    first_token_ms: float | None
    stages: list[Stage]
    prompt_chunks: list[PromptChunk]
    num_prompt_chunks: int
    steps: int
    steps_with_prompts: int
    prefix: LeftCache | None
    causes: list[Cause]


async def explain_request(context: ServiceContext, name: str) -> list[Explained]:
    """Explain every sample of a request; a tenant (owner of an API key) sees only its own.

    Args:
        context: the server's context.
        name: a `rid`, the `rid` of a batch, an answer's id, or the id of an HTTP request.

    Raises:
        UnknownRequest: no running or recent request of the tenant has that name.
    """
    tenant = TENANT.get() or None
    history = context.client.history
    found = history.find(name, tenant)
    if not found:
        raise UnknownRequest(
            f"No request {name[:64]!r} runs or is among the last ones that are kept."
        )
    # The worker's times may arrive a moment after the answer.
    deadline = time.monotonic() + _TOLD_WITHIN_S
    while not all(map(_is_told, found)) and time.monotonic() < deadline:  # noqa: ASYNC110  # rare
        await asyncio.sleep(_POLL_S)
    return [_Reading(context, history, trace, tenant).explained() for trace in found]


def _is_told(trace: RequestTrace) -> bool:
    """Whether the worker's times have arrived, or cannot: the request runs or was never sent."""
    return not trace.outcome or not trace.sent_at or trace.worker is not None


@dataclass(frozen=True)
class _Left:
    """Where the cached prefix of a prompt ended.

    Attributes:
        told: the position, as the client sees it.
        is_cold: whether no cached prompt begins like this one.
        is_late: whether computation began before that position, at a snapshot of recurrent states.
    """

    told: LeftCache
    is_cold: bool
    is_late: bool


class _Reading:
    """Turns the trace of one sample into its explanation."""

    def __init__(
        self,
        context: ServiceContext,
        history: RequestHistory,
        trace: RequestTrace,
        tenant: str | None,
    ) -> None:
        self._context = context
        self._history = history
        self._trace = trace
        self._tenant = tenant
        # The worker reports its times only when the request ends.
        self._worker = trace.worker or WorkerTimes(trace.request_id)
        arrival = trace.arrival
        self._spent: dict[FrontWork, float] = arrival.spent_s if arrival is not None else {}
        self._began_at = trace.admitted_at if arrival is None else arrival.began_at
        self._end_at = self._find_end()

    def _find_end(self) -> float:
        trace = self._trace
        if not trace.finished_at or not trace.outcome:
            return time.monotonic()
        closed_at = trace.arrival.closed_at if trace.arrival is not None else 0.0
        return max(trace.finished_at, closed_at)

    def explained(self) -> Explained:
        trace, worker = self._trace, self._worker
        left = self._left_cache()
        first_at = trace.first_token_at
        return {
            "rid": trace.name[1],
            "http_id": trace.arrival.http_id if trace.arrival is not None else "",
            "outcome": trace.outcome,
            "is_complete": trace.worker is not None,
            "prompt_tokens": trace.num_prompt,
            "cached_tokens": worker.cached_tokens,
            "completion_tokens": trace.num_output,
            "images": trace.num_images,
            "retractions": worker.num_retractions,
            "resumes": trace.num_resumes,
            "total_ms": _ms(self._end_at - self._began_at),
            "first_token_ms": _ms(first_at - self._began_at) if first_at else None,
            "stages": list(self._stages()),
            "prompt_chunks": [
                {
                    "start": each.start,
                    "tokens": each.num_tokens,
                    "at_ms": _ms(each.planned_at - self._began_at),
                }
                for each in worker.chunks
            ],
            "num_prompt_chunks": worker.num_chunks,
            "steps": worker.plain_steps + worker.mixed_steps,
            "steps_with_prompts": worker.mixed_steps,
            "prefix": None if left is None else left.told,
            "causes": self._causes(left),
        }

    # ---- stages ----

    def _stages(self) -> Iterator[Stage]:
        trace, worker = self._trace, self._worker
        at = self._began_at
        last = "socket" if trace.finished_at else "running"
        ends: tuple[tuple[str, float, Mapping[str, float]], ...] = (
            ("front", trace.admitted_at, self._front_parts()),
            ("held back", trace.sent_at - trace.lost_s, self._held_parts()),
            ("processes that ended", trace.sent_at if trace.lost_s else 0.0, {}),
            ("way to the scheduler", worker.received_at, {}),
            ("grammar at the scheduler", worker.queued_at, {}),
            ("queue", worker.admitted_at or worker.ended_at, self._queue_parts()),
            ("prompt", worker.prompt_done_at, {"images": worker.tower_s}),
            ("decode", worker.ended_at, self._decode_parts()),
            ("detokenizer", trace.finished_at, {}),
            (last, self._end_at, {"blocked by the reader": self._blocked_s()}),
        )
        for name, end, parts in ends:
            if end <= at:
                continue
            told = {part: _ms(seconds) for part, seconds in parts.items() if seconds > 0}
            yield {"name": name, "ms": _ms(end - at), "parts": told}
            at = end

    def _front_parts(self) -> dict[str, float]:
        parts = {str(work): seconds for work, seconds in self._spent.items()}
        if files_s := parts.pop("files", 0.0):
            parts["images"] = max(parts.get("images", 0.0) - files_s, 0.0)
            parts["image files"] = files_s
        return parts

    def _held_parts(self) -> dict[str, float]:
        return {_HOLDS[reason]: seconds for reason, seconds in self._trace.held_s.items()}

    def _queue_parts(self) -> dict[str, float]:
        return {
            _WAITS[wait]: seconds for wait, seconds in zip(Wait, self._worker.waits, strict=False)
        }

    def _decode_parts(self) -> dict[str, float]:
        worker = self._worker
        return {
            "steps that only decode": worker.plain_s,
            "steps with other prompts": worker.mixed_s,
            "retracted": worker.retracted_s,
        }

    def _blocked_s(self) -> float:
        arrival = self._trace.arrival
        return 0.0 if arrival is None else arrival.blocked_s

    def _waited_s(self, wait: Wait) -> float:
        waits = self._worker.waits
        return waits[wait] if waits else 0.0

    def _held_s(self, *reasons: Hold) -> float:
        held_s = self._trace.held_s
        return sum(held_s.get(reason, 0.0) for reason in reasons)

    # ---- the prefix cache ----

    def _left_cache(self) -> _Left | None:
        trace, worker = self._trace, self._worker
        prefix = worker.prefix
        if prefix is None or trace.worker is None:
            return None
        ids = list(memoryview(trace.break_ids).cast("i"))
        before, after = ids[: trace.num_before], ids[trace.num_before :]
        in_system = prefix.differs and self._is_in_system(before, after)
        told: LeftCache = {
            "index": prefix.index,
            "kind": "differs" if prefix.differs else "new",
            "in_system": in_system,
            "before": self._text(before),
            "after": self._text(after),
        }
        page_size = self._context.config.scheduling.page_size or 1
        is_late = self._context.model.is_recurrent and (
            prefix.index - worker.cached_tokens >= page_size
        )
        is_cold = not worker.cached_tokens and not in_system and not is_late
        return _Left(told, is_cold, is_late)

    def _is_in_system(self, before: list[int], after: list[int]) -> bool:
        """Whether the text around the first uncached token belongs to the system message."""
        system = self._history.system_of(self._trace)
        if not system or not before or not after:
            return False
        shared = self._text(before[-1:]).strip()
        follows = self._text(after[:_FOLLOWING]).strip()
        around = self._text([*before[-_FOLLOWING:], *after[:1]]).strip()
        return bool(shared) and shared in system and (follows in system or around in system)

    def _text(self, ids: list[int]) -> str:
        tokenizer = self._context.tokenizer
        if tokenizer.is_missing or not ids:
            return ""
        return tokenizer.decode(ids, skip_special_tokens=False)

    # ---- causes ----

    def _causes(self, left: _Left | None) -> list[Cause]:
        least_s = max(_LEAST_SHARE * (self._end_at - self._began_at), _LEAST_S)
        found = [
            (name, seconds, text)
            for part in (self._at_front(), self._in_queue(), self._at_worker(left))
            for name, seconds, text in part
            if seconds >= least_s
        ]
        found.sort(key=lambda each: -each[1])
        return [{"name": name, "ms": _ms(seconds), "text": text} for name, seconds, text in found]

    def _at_front(self) -> Iterator[tuple[CauseName, float, str]]:
        trace, spent = self._trace, self._spent
        yield "slow sender", spent.get("body", 0.0), "The client sent the request's body slowly."
        yield "large body", spent.get("parse", 0.0), "The JSON of the request's body was long."
        yield (
            "slow reader",
            self._blocked_s(),
            "The client did not read: the socket took no more of the answer.",
        )
        loaded_s, files_s = spent.get("adapter", 0.0), spent.get("files", 0.0)
        yield (
            "slow disk",
            self._held_s("disk") + loaded_s + files_s,
            "It waited for files: "
            + " and ".join(
                text
                for text, seconds in (
                    ("weights that were loaded meanwhile", self._held_s("disk")),
                    ("its adapter", loaded_s),
                    ("its images", files_s),
                )
                if seconds
            )
            + ".",
        )
        yield "weight update", self._held_s("update"), "A trainer changed the weights meanwhile."
        yield (
            "restart",
            self._held_s("process", "restart") + trace.lost_s,
            f"{trace.num_resumes} processes that ran it ended; it went on in a new one."
            if trace.num_resumes
            else "It waited for a worker that was starting.",
        )
        queued_s = self._worker.queued_at - self._worker.received_at
        yield (
            "grammar compilation",
            self._held_s("grammar") + max(queued_s, 0.0),
            "It waited until the grammar of its output was compiled.",
        )

    def _in_queue(self) -> Iterator[tuple[CauseName, float, str]]:
        held, waited = self._trace.held_s, self._waited_s
        paused_s = held.get("pause", 0.0) + held.get("session", 0.0)
        yield "full pool", waited(Wait.PAGES), "The KV pool had too few free pages."
        yield "full batch", waited(Wait.ROWS), "All rows of the running batch were taken."
        yield "pause", paused_s + waited(Wait.PAUSE), "Generation was paused."
        yield "adapter slots", waited(Wait.ADAPTER), "Other adapters had all slots."
        yield (
            "shared prefix",
            waited(Wait.SHARED),
            "Another request computed the same prefix, which this one then used.",
        )
        yield "state slots", waited(Wait.STATES), "All slots were taken (`--max-mamba-cache-size`)."
        yield "files", waited(Wait.FILES), "The start of its prompt was read from files."

    def _at_worker(self, left: _Left | None) -> Iterator[tuple[CauseName, float, str]]:
        trace, worker = self._trace, self._worker
        yield (
            "retraction",
            worker.retracted_s,
            f"The KV pool was full: it lost its pages {worker.num_retractions} times, and its "
            "tokens were computed again.",
        )
        yield "long neighbor", self._beside_prompts_s(), self._neighbors()
        image_s = worker.tower_s if trace.num_images else 0.0
        prepared_s = self._spent.get("images", 0.0) - self._spent.get("files", 0.0)
        yield (
            "large image",
            image_s + prepared_s,
            f"{trace.num_images} images: {_ms(prepared_s)} ms to decode and scale, {_ms(image_s)} "
            "ms in steps that computed images.",
        )
        prompt_s = max(worker.prompt_done_at - worker.admitted_at, 0.0) - image_s
        if left is not None:
            name, text = self._of_cache(left)
            yield name, prompt_s, text

    def _of_cache(self, left: _Left) -> tuple[CauseName, str]:
        trace, worker, told = self._trace, self._worker, left.told
        computed = trace.num_prompt - worker.cached_tokens
        count = f"{computed} of {trace.num_prompt} prompt tokens were computed"
        if left.is_late:
            count += f", from the last snapshot of its states, at token {worker.cached_tokens}"
        if told["in_system"]:
            return "changed system line", (
                f"The system message differs from the cached one at token {told['index']}: {count}."
            )
        if worker.is_cache_empty:
            return "cold cache", f"The prefix cache was empty: {count}."
        if left.is_cold:
            return "cold cache", f"No cached prompt begins like this one: {count}."
        return "new prompt text", f"The cached prompts go up to token {told['index']}: {count}."

    def _beside_prompts_s(self) -> float:
        """Return the seconds that prompts of other requests added to this request's steps."""
        worker, trace = self._worker, self._trace
        usual_s = worker.usual_step_s
        if worker.plain_steps:
            usual_s = worker.plain_s / worker.plain_steps
        lost_s = max(worker.mixed_s - usual_s * worker.mixed_steps, 0.0)
        if worker.read_after is not None and trace.sent_at:
            unread_s = max(worker.received_at - trace.sent_at, 0.0)
            lost_s += min(unread_s, worker.read_after.step_s)
        return lost_s + self._waited_s(Wait.PROMPTS)

    def _neighbors(self) -> str:
        worker = self._worker
        found = worker.neighbor or worker.read_after
        text = f"{worker.mixed_steps} of its steps computed prompts of other requests as well"
        if found is None:
            return f"{text}, or it waited for such steps."
        rid = self._history.rid_of(found.request_id, self._tenant)
        whose = "another request" if rid is None else f"request {rid}"
        return (
            f"{text}; the slowest such step took {_ms(found.step_s)} ms for "
            f"{found.num_prompt_tokens} prompt tokens, most of them of {whose}."
        )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
