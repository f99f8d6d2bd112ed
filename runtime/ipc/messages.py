"""The messages between processes: one union of types per receiver, encoded as msgpack.

The client numbers requests (`request_id`, an integer). The caller's `rid` is only returned to it.
Token ids are sent as little-endian int32 bytes: a prompt of 100,000 tokens costs a copy, not a loop
in Python.
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
    """Gives the scheduler a prompt for which it generates an output.

    Attributes:
        request_id: number of the request, unique in its worker.
        input_ids: little-endian int32 bytes, token ids of the prompt, all below the logits' width.
        spec: the request's parameters. Its `max_new_tokens` is set and fits the context; its `seed`
            is set.
        arrival: when the request arrived at the front process, `time.monotonic()`, which processes
            of one machine share.
        grammar_key: key of the compiled grammar for the output; empty without a grammar.
        grammar: the compiled grammar; empty if the scheduler has it.
        is_resumed: whether an earlier process had accepted the request and died. The limit on
            waiting requests does not apply to it.
        output_ids: int32 bytes, the output that the client has received; generation continues
            after it.
        num_shown: number of characters of text that the client has received.
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
    """Tells the scheduler to stop these requests; each of them still gets its final message."""

    request_ids: list[int]


class AbortAll(_Message, frozen=True):
    """Tells the scheduler to stop all requests and to report `message` to the callers."""

    message: str = "Aborted"


class StopHit(_Message, frozen=True):
    """Tells the scheduler to end requests silently: the detokenizer found a stop string in them."""

    request_ids: list[int]


class FlushCache(_Message, frozen=True):
    """Tells the scheduler to empty the prefix cache; refused while requests run or wait."""

    call_id: int


class MatchPrefix(_Message, frozen=True):
    """Asks the scheduler how much of a prompt is cached; the reply has an encoded `PrefixReport`.

    Attributes:
        call_id: number of the call, repeated in the reply.
        input_ids: little-endian int32 bytes, token ids of the prompt.
        namespace: namespace of the prefix cache in which to look.
        images: images of the prompt, identified by their digests; without pixels.
    """

    call_id: int
    input_ids: bytes
    namespace: str
    images: list[ImageInput] = []


class PrefixReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far a prompt agrees with the most similar cached prompt; the reply to `MatchPrefix`.

    Attributes:
        num_tokens: number of common first tokens.
        num_cached: number of tokens that a request would take from the cache, in whole pages.
        differs: whether the cached prompt continues with another token; otherwise it ends there.
    """

    num_tokens: int
    num_cached: int
    differs: bool


class Ping(_Message, frozen=True):
    """Asks the scheduler's loop for a reply.

    A reply proves more than a heartbeat: messages are handled.
    """

    call_id: int


class ProfileSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a profile records, and where its files go.

    Attributes:
        folder: an existing folder for the files.
        name: beginning of all file names.
        activities: what is recorded, by the names of the native API: `CPU`, `GPU`, `MEM`,
            `CUDA_PROFILER`.
        start_step: first step that is recorded, counted from the worker's start.
        num_steps: number of steps that are recorded, for each stage; then the profile ends.
        stages: `EXTEND` (steps with prompts) and `DECODE`, each with a file of its own; empty for
            one file of all steps.
        with_stack: record Python and C++ call stacks.
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
    """Tells a worker to start a profile; refused while another one is running."""

    call_id: int
    spec: ProfileSpec


class StopProfile(_Message, frozen=True):
    """Tells a worker to end the profile and write its files; refused if none is running."""

    call_id: int


class SlowDown(_Message, frozen=True):
    """Tells the worker to wait for `seconds` before each step from now on; 0 for no wait."""

    call_id: int
    seconds: float


class FreezeGarbage(_Message, frozen=True):
    """Tells a worker to collect Python's garbage now, and to freeze what remains (`gc.freeze`)."""

    call_id: int


class SetLogLevel(_Message, frozen=True):
    """Tells a worker to set its log level to `level`, such as `debug`."""

    call_id: int
    level: str


class SetOptions(_Message, frozen=True):
    """Tells the scheduler to change options; the values are already checked.

    The names are `max_queued_requests` and `decode_log_interval`, as on the command line.
    """

    call_id: int
    values: dict[str, int]


class RecordExperts(_Message, frozen=True):
    """Tells a worker to start or stop recording chosen experts, or to write them to a file."""

    call_id: int
    action: Literal["start", "stop", "dump"]


# Commands that all ranks of a worker execute.
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
    """Tells the grammar compiler to compile a checked grammar; a `GrammarReply` answers."""

    call_id: int
    grammar: GrammarSpec


# ---- scheduler -> detokenizer -------------------------------------------------------------------


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Why a request ended, in the native API's format.

    Attributes:
        type: `stop` for a normal end, `length` for a token limit, `abort` for an error.
        matched: the token id, stop string or stop pattern that ended the request.
        length: the token limit that was reached.
        message, status_code, err_type: the error; set for `abort`.
    """

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None


def internal_error(message: str) -> FinishReason:
    """Return the finish reason for a request that failed through no fault of its client.

    `message` is shown to the client.
    """
    return FinishReason("abort", message=message, status_code=500, err_type="InternalServerError")


def refusal(message: str, status_code: int) -> FinishReason:
    """Return the finish reason for a request that can never run (400), or not now (503)."""
    err_type = "BadRequestError" if status_code == 400 else "SERVICE_UNAVAILABLE"
    return FinishReason("abort", message=message, status_code=status_code, err_type=err_type)


class StreamStart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Gives the detokenizer what it needs before the first token of a request.

    The fields that are not described here are the request's own parameters.

    Attributes:
        prompt_tail: int32 bytes, the last tokens of the prompt, as context of the first text.
        admitted_at: when the request left the queue, `time.monotonic()`; 0 if it never did.
        min_new_tokens: stop strings and patterns that end within this many tokens are ignored.
        thoughts: texts that mark thoughts (reasoning), in which stop strings are not searched.
        output_ids: int32 bytes, output tokens that an earlier process has sent, with their extra
            outputs.
        num_shown: number of characters of text that the earlier process has sent.
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
    """Tells the detokenizer that the scheduler has ended a request and sends no further tokens.

    Attributes:
        num_retractions: how often the request lost its pages of the KV cache and went back to the
            queue.
    """

    request_id: int
    reason: FinishReason
    num_retractions: int = 0


class TokenDeltas(_Message, frozen=True):
    """Gives the detokenizer the new tokens of all requests in one step.

    Attributes:
        starts: requests that appear for the first time.
        cached_tokens: for each entry of `starts`, number of its prompt tokens that were cached.
        request_ids: requests that have new tokens.
        token_counts: for each entry of `request_ids`, number of its tokens in `token_ids`.
        token_ids: int32 bytes, all new tokens, concatenated.
        ends: requests that end with this step.
        extras: extra outputs, such as log-probabilities, about the step's tokens and prompt chunks.
    """

    starts: list[StreamStart]
    cached_tokens: list[int]
    request_ids: list[int]
    token_counts: list[int]
    token_ids: bytes
    ends: list[StreamEnd]
    extras: list[ExtraBlock] = []


class ResetStreams(_Message, frozen=True):
    """Tells the detokenizer to forget all requests, because their scheduler process has ended."""


DetokenizerInbound = TokenDeltas | ResetStreams


# ---- scheduler, detokenizer and grammar compiler -> front ---------------------------------------


class BeginTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When a request left the queue and had its first token, `time.monotonic()`; 0 for never."""

    admitted_at: float = 0.0
    first_token_at: float = 0.0


class TextDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The new text of one request, sent by the detokenizer to the front process.

    Attributes:
        text: new complete characters. Empty while the text may be the beginning of a stop string.
        token_ids: int32 bytes, the new tokens.
        reason: why the request ended; set in its last delta.
        cached_tokens: number of cached prompt tokens; set in the first delta, else -1.
        num_retractions: how often the request lost its pages of the KV cache and went back to the
            queue; set in the last delta.
        extras: extra outputs in order. If a stop string removed tokens, outputs about these tokens
            may be included.
        times: when the request left the queue and had its first token; set in the first delta.
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
    """Gives the front process the new text of all requests in one step of the model."""

    deltas: list[TextDelta]


class Progress(_Message, frozen=True):
    """Tells the front process how far the worker's start-up is.

    Attributes:
        phase: the phase that runs now.
        fraction: part of this phase that is done, from 0 to 1.
        detail: what the phase works on, for the log; may be empty.
    """

    phase: Phase
    fraction: float = 0.0
    detail: str = ""


class WorkerReady(_Message, frozen=True):
    """Tells the front process that the worker is ready. Most fields are reported to users.

    Attributes:
        max_total_num_tokens: capacity of the KV pool in tokens.
        max_running_requests: most requests that run at the same time.
        weight_bytes, kv_bytes: memory of the weights and of the KV pool.
        load_seconds: seconds from the start of the process until it was ready.
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
    """Tells the front process that the detokenizer, whose process id is `pid`, is ready."""

    pid: int


class StartupFailed(_Message, frozen=True):
    """Tells the front process that the worker cannot start; `message` is one line for the user."""

    message: str


class ControlReply(_Message, frozen=True):
    """Answers a message of the front process that has a `call_id`.

    Attributes:
        call_id: number of the message that is answered.
        success: whether the operation succeeded.
        message: why it failed, or its result as a text.
        data: the requested data; empty if none was requested.
        is_partial: set when answers of several replicas were merged, and some succeeded while
            others failed.
    """

    call_id: int
    success: bool
    message: str = ""
    data: bytes = b""
    is_partial: bool = False


class RequestError(_Message, frozen=True):
    """Tells the front process that requests failed before the detokenizer knew them."""

    request_ids: list[int]
    message: str


class GrammarReply(_Message, frozen=True):
    """Answers `CompileGrammar` with the result of the compilation.

    Attributes:
        payload: the compiled grammar; empty if it cannot be used.
        error: why the grammar cannot be used; empty on success.
        got_no_processor: whether the compilation was given up only because the machine was busy.
    """

    call_id: int
    payload: bytes = b""
    error: str = ""
    got_no_processor: bool = False


class GrammarsUnavailable(_Message, frozen=True):
    """Tells the front process that the grammar compiler cannot compile anything, and ends."""

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
