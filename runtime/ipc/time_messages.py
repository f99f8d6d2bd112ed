"""A worker's report of how a request spent its time, sent when the request has ended."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Wait(IntEnum):
    """What a request in the queue waits for.

    Attributes:
        STEP: the end of a step that only decodes.
        PROMPTS: the end of a step whose token budget was used up by other prompts.
        ROWS: a place in the running batch (`--max-running-requests`).
        PAGES: pages of the KV pool.
        PAUSE: the end of a pause of generation.
        ADAPTER: a slot on the device for its LoRA adapter.
        SHARED: another request that computes the same prefix.
        STATES: slots of recurrent states (`--max-mamba-cache-size`).
        FILES: pages that are read from files (`--hicache-storage-backend`).
    """

    STEP = 0
    PROMPTS = 1
    ROWS = 2
    PAGES = 3
    PAUSE = 4
    ADAPTER = 5
    SHARED = 6
    STATES = 7
    FILES = 8


class ChunkTime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt chunk: a part of a prompt that one step computed.

    Attributes:
        start: position of the chunk's first token in the prompt.
        num_tokens: number of tokens.
        planned_at: when the step was planned, `time.monotonic()`.
    """

    start: int
    num_tokens: int
    planned_at: float


class Neighbor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step that computed prompts, as a cause of delay for a request that decodes.

    Attributes:
        step_s: duration of the step, seconds.
        num_prompt_tokens: number of prompt tokens that the step computed, for all requests.
        request_id: id of the request with the longest prompt chunk in the step.
    """

    step_s: float
    num_prompt_tokens: int
    request_id: int


class PrefixBreak(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a prompt differs from all cached prompts, found when the request was admitted.

    Attributes:
        index: the first position that no cached prompt has in common with the prompt. If very many
            cached prompts continue differently, it is rounded down to the beginning of a page.
        differs: whether cached prompts continue with another token there; otherwise they end there.
    """

    index: int
    differs: bool


class WorkerTimes(msgspec.Struct, array_like=True, gc=False):
    """How one request spent its time in one worker.

    Fields that end in `_at` are values of `time.monotonic()`; 0 if the event did not happen.

    Attributes:
        received_at: when the scheduler read the request's message.
        queued_at: when the request entered the queue; its grammar was loaded before.
        admitted_at: when the request left the queue.
        prompt_done_at: when its prompt was computed and its first token was known.
        ended_at: when the scheduler ended the request.
        waits: for each value of `Wait`, seconds in the queue before the first admission.
        chunks: the first chunks of the prompt.
        num_chunks: number of all chunks of the prompt.
        num_computed: number of prompt tokens that were computed, with recomputed ones.
        tower_s: seconds of steps that computed images, before `prompt_done_at`.
        plain_steps, plain_s: number and seconds of the steps after `prompt_done_at` that only
            decoded.
        mixed_steps, mixed_s: number and seconds of the steps after `prompt_done_at` that also
            computed prompts of other requests.
        neighbor: the slowest step of `mixed_steps`.
        read_after: the step after which the message was read, if it computed prompts; else `None`.
        usual_step_s: mean duration of the worker's steps that only decoded, seconds.
        num_retractions: how often the request lost its pages of the KV cache and was put back into
            the queue.
        retracted_s: seconds from each retraction until the lost tokens were computed again.
        cached_tokens: number of prompt tokens found in the prefix cache at the first admission.
        prefix: where the prompt differs from all cached prompts. `None` if the whole prompt is
            cached, or without a prefix cache.
        is_cache_empty: whether the request's namespace of the cache was empty.
    """

    request_id: int
    received_at: float = 0.0
    queued_at: float = 0.0
    admitted_at: float = 0.0
    prompt_done_at: float = 0.0
    ended_at: float = 0.0
    waits: list[float] = []
    chunks: list[ChunkTime] = []
    num_chunks: int = 0
    num_computed: int = 0
    tower_s: float = 0.0
    plain_steps: int = 0
    plain_s: float = 0.0
    mixed_steps: int = 0
    mixed_s: float = 0.0
    neighbor: Neighbor | None = None
    read_after: Neighbor | None = None
    usual_step_s: float = 0.0
    num_retractions: int = 0
    retracted_s: float = 0.0
    cached_tokens: int = 0
    prefix: PrefixBreak | None = None
    is_cache_empty: bool = False


class RequestTimes(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Gives the front process the times of the requests that ended since the last such message."""

    ended: list[WorkerTimes]
