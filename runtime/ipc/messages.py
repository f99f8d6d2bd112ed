"""Every message that crosses a process: one union per receiver, msgpack, no object construction.

Ids are made by the client (`request_id`, an integer); the caller's `rid` is only echoed. Token ids
travel as little-endian int32 bytes: a 100,000-token prompt costs a copy, not a Python loop.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from runtime.ipc.time_messages import RequestTimes
from runtime.ipc.weight_messages import (
    ContinueGeneration,
    InvalidateCache,
    PauseGeneration,
    WeightCall,
)
from runtime.requests.extra_spec import ExtraBlock
from runtime.requests.image_input import ImageInput
from runtime.requests.request_spec import RequestSpec
from runtime.requests.sampling_params import GrammarSpec, ThoughtTexts

Phase = Literal[
    "starting", "importing", "loading_weights", "allocating_cache", "warming_up", "ready", "failed"
]
Stage = Literal["EXTEND", "DECODE"]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    pass


# ---- front -> scheduler -------------------------------------------------------------------------


class GenerateRequest(_Message, frozen=True):
    """One prompt to continue.

    Attributes:
        input_ids: little-endian int32 bytes, checked against the logits' width.
        spec: the request; its `max_new_tokens` is set and fits the context, its `seed` is set.
        arrival: when the request came to the front, `time.monotonic()`, comparable across processes
            of one machine.
        grammar_key: key of the compiled grammar that the output follows; empty for free text.
        grammar: the compiled grammar; only when the scheduler does not have it.
        is_resumed: whether an earlier process accepted the request and died; its queue bound does
            not apply again.
        output_ids: int32 bytes, the output so far, which its reader has; the request goes on after
            it, as after a retraction.
        num_shown: characters of text that the reader has.
    """

    request_id: int
    input_ids: bytes
    spec: RequestSpec
    arrival: float = 0.0
    grammar_key: bytes = b""
    grammar: bytes = b""
    is_resumed: bool = False
    output_ids: bytes = b""
    num_shown: int = 0


class AbortRequests(_Message, frozen=True):
    """Stop these requests; each still gets its final message."""

    request_ids: list[int]


class AbortAll(_Message, frozen=True):
    """Stop every request, running or waiting; `message` is the reason they report."""

    message: str = "Aborted"


class StopHit(_Message, frozen=True):
    """The detokenizer found a stop string: the scheduler may drop the request without a message."""

    request_ids: list[int]


class FlushCache(_Message, frozen=True):
    """Drop the prefix cache; refused while requests run or wait."""

    call_id: int


class MatchPrefix(_Message, frozen=True):
    """Ask how much of a prompt is cached; answered by an encoded `PrefixReport`.

    Attributes:
        input_ids: little-endian int32 bytes.
        namespace: name space of the prefix cache.
        images: images of the prompt, identified by their digests; their pixels are not sent.
    """

    call_id: int
    input_ids: bytes
    namespace: str
    images: list[ImageInput] = []


class PrefixReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The length of the common prefix of a prompt and the most similar cached prompt.

    Attributes:
        num_tokens: length of the common prefix.
        num_cached: number of prompt tokens that a request would take from the cache, in whole
            pages.
        differs: whether the cached prompt continues with another token; otherwise it ends there.
    """

    num_tokens: int
    num_cached: int
    differs: bool


class Ping(_Message, frozen=True):
    """Asks the scheduler's loop itself for an answer, which proves more than a heartbeat."""

    call_id: int


class ProfileSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The steps and events that a profile records, and the folder of its files.

    Attributes:
        folder: an existing folder for the files.
        name: how every file's name begins.
        activities: names of the native API, checked: `CPU`, `GPU`, `MEM`, `CUDA_PROFILER`.
        start_step: first step that is recorded, counted from the worker's start.
        num_steps: number of steps to record of each stage; then the profile ends.
        stages: `EXTEND` and `DECODE`, with a separate file each; empty for one file of all steps.
        with_stack: record the Python and C++ call stacks.
        record_shapes: record the shapes of operators' inputs.
        merge: also write a file with the traces of all ranks.
    """

    folder: str
    name: str
    activities: list[str]
    start_step: int
    num_steps: int
    stages: list[Stage] = []
    with_stack: bool = True
    record_shapes: bool = False
    merge: bool = False


class StartProfile(_Message, frozen=True):
    """Record steps from now on; refused while a profile runs."""

    call_id: int
    spec: ProfileSpec


class StopProfile(_Message, frozen=True):
    """Write the recorded steps; refused while no profile runs."""

    call_id: int


class SlowDown(_Message, frozen=True):
    """Sleep `seconds` before each step; 0 ends it."""

    call_id: int
    seconds: float


class FreezeGarbage(_Message, frozen=True):
    """Collect garbage now and exclude all surviving objects from later collections."""

    call_id: int


class SetLogLevel(_Message, frozen=True):
    """Change how much this worker logs."""

    call_id: int
    level: str


class SetOptions(_Message, frozen=True):
    """Change options of the scheduler, already checked, with the command line's names and units.

    The options are `max_queued_requests` and `decode_log_interval`.
    """

    call_id: int
    values: dict[str, int]


class RecordExperts(_Message, frozen=True):
    """Start or stop recording which experts are chosen, or write the record."""

    call_id: int
    action: Literal["start", "stop", "dump"]


# Commands that every rank of a worker executes.
WorkerCommand = StartProfile | StopProfile | SlowDown | FreezeGarbage | SetLogLevel | RecordExperts

SchedulerInbound = (
    GenerateRequest
    | AbortRequests
    | AbortAll
    | StopHit
    | FlushCache
    | MatchPrefix
    | Ping
    | SetOptions
    | WorkerCommand
    | WeightCall
    | PauseGeneration
    | ContinueGeneration
    | InvalidateCache
)


# ---- front -> grammar compiler ------------------------------------------------------------------


class CompileGrammar(_Message, frozen=True):
    """Compile a constraint that was checked; answered by a `GrammarReply`."""

    call_id: int
    grammar: GrammarSpec


# ---- scheduler -> detokenizer -------------------------------------------------------------------


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Why a request ended, in the native API's format.

    Attributes:
        matched: the token id, stop string or stop pattern that ended it.
        length: the token limit that was reached.
        message, status_code, err_type: set for `abort`.
    """

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None


def internal_error(message: str) -> FinishReason:
    """The finish reason of a request that failed without its client's fault.

    `message` is for the client.
    """
    return FinishReason("abort", message=message, status_code=500, err_type="InternalServerError")


def refusal(message: str, status_code: int) -> FinishReason:
    """The finish reason of a request that can never run (400), or not now (503)."""
    err_type = "BadRequestError" if status_code == 400 else "SERVICE_UNAVAILABLE"
    return FinishReason("abort", message=message, status_code=status_code, err_type=err_type)


class StreamStart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The data that the detokenizer needs before a request's first token.

    Attributes:
        admitted_at: when the request left the queue, `time.monotonic()`; 0 if it never did.
        min_new_tokens: stop strings and patterns that end within this many tokens do not count.
        thoughts: texts that mark thoughts, in which stop strings and patterns are not searched.
        output_ids: int32 bytes, tokens that were sent before this stream began, with their extras.
        num_shown: characters of text that were sent with those tokens.
    """

    request_id: int
    stream: bool
    stop: list[str]
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    stream_interval: int
    prompt_tail: bytes
    stop_regex: list[str] = []
    admitted_at: float = 0.0
    min_new_tokens: int = 0
    thoughts: ThoughtTexts | None = None
    output_ids: bytes = b""
    num_shown: int = 0


class StreamEnd(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's end as the scheduler sees it, with the counts the answer reports."""

    request_id: int
    reason: FinishReason
    num_retractions: int = 0


class TokenDeltas(_Message, frozen=True):
    """One step's new tokens of the whole batch.

    Attributes:
        starts: requests that appear for the first time.
        request_ids: one entry per request with new tokens or an end.
        token_counts: how many of `token_ids` belong to each entry of `request_ids`.
        token_ids: int32 bytes, concatenated.
        cached_tokens: for each entry of `starts`, prompt tokens found in the prefix cache.
        ends: requests that end with this step.
        extras: reports about this step's tokens and about prompt chunks, for requests that have
            extras.
    """

    starts: list[StreamStart]
    cached_tokens: list[int]
    request_ids: list[int]
    token_counts: list[int]
    token_ids: bytes
    ends: list[StreamEnd]
    extras: list[ExtraBlock] = []


class ResetStreams(_Message, frozen=True):
    """Forget every stream: the scheduler that fed them is gone."""


DetokenizerInbound = TokenDeltas | ResetStreams


# ---- scheduler, detokenizer and grammar compiler -> front ---------------------------------------


class BeginTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When a request left the queue and got its first token, `time.monotonic()`; 0 for never."""

    admitted_at: float = 0.0
    first_token_at: float = 0.0


class TextDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New text of one request.

    Attributes:
        text: new whole characters; empty while a stop string may be forming.
        token_ids: the new tokens, int32 bytes.
        reason: set on the last delta of the request.
        cached_tokens: set on the first delta, else -1.
        num_retractions: set on the last delta: times the request was retracted and recomputed.
        extras: reports of extras in order; after a stop string some may be about tokens after
            `token_ids`.
        times: when the request left the queue and got its first token; set on the first delta.
    """

    request_id: int
    text: str
    token_ids: bytes
    reason: FinishReason | None = None
    cached_tokens: int = -1
    num_retractions: int = 0
    extras: list[ExtraBlock] | None = None
    times: BeginTimes | None = None


class TextDeltas(_Message, frozen=True):
    """One step's new text for the whole batch."""

    deltas: list[TextDelta]


class Progress(_Message, frozen=True):
    """Progress of the worker's start-up; `fraction` is within the phase, 0 to 1."""

    phase: Phase
    fraction: float = 0.0
    detail: str = ""


class WorkerReady(_Message, frozen=True):
    """The worker can take requests; the fields are what the front reports to users.

    Attributes:
        max_total_num_tokens: capacity of the KV pool, tokens.
        max_running_requests: rows of the running batch.
        weight_bytes, kv_bytes: memory held by the weights and by the KV pool.
        load_seconds: seconds from the start of the process until it is ready.
        pid: the worker's process id, which distinguishes it from an earlier worker.
    """

    max_total_num_tokens: int
    max_running_requests: int
    page_size: int
    dtype: str
    device: str
    attention_backend: str
    weight_bytes: int
    kv_bytes: int
    load_seconds: float
    pid: int


class DetokenizerReady(_Message, frozen=True):
    """The detokenizer has loaded its tokenizer; `pid` distinguishes it from an earlier one."""

    pid: int


class StartupFailed(_Message, frozen=True):
    """The worker cannot start; `message` is one line for the user."""

    message: str


class ControlReply(_Message, frozen=True):
    """Answer to a message with a `call_id`.

    Attributes:
        data: the requested data, if any.
        is_partial: set when replies of several replicas are merged: this one failed and others
            succeeded.
    """

    call_id: int
    success: bool
    message: str = ""
    data: bytes = b""
    is_partial: bool = False


class RequestError(_Message, frozen=True):
    """Requests that failed before the detokenizer got a token of theirs."""

    request_ids: list[int]
    message: str


class GrammarReply(_Message, frozen=True):
    """The result of compiling a constraint: `payload` when it can be used, else `error`.

    Attributes:
        got_no_processor: whether compiling was given up only because the machine was busy.
    """

    call_id: int
    payload: bytes = b""
    error: str = ""
    got_no_processor: bool = False


class GrammarsUnavailable(_Message, frozen=True):
    """No constraint at all can be compiled; the compiler's last message."""

    reason: str


GrammarInbound = GrammarReply | GrammarsUnavailable
FrontInbound = (
    TextDeltas
    | Progress
    | WorkerReady
    | DetokenizerReady
    | StartupFailed
    | ControlReply
    | RequestError
    | RequestTimes
)
