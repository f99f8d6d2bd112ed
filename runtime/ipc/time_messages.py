"""A worker's report of how a request spent its time, sent when the request has ended."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Wait(IntEnum):
    """The reason why a request waits in the queue.

    Attributes:
        STEP: the end of a step that only decodes.
        PROMPTS: the end of a step that computes other prompts, which had taken the token budget.
        ROWS: a row of the running batch (`--max-running-requests`).
        PAGES: pages of the KV pool.
        PAUSE: generation is paused.
        ADAPTER: a slot for its adapter.
        SHARED: another request that computes the same prefix.
        STATES: slots of recurrent states (`--max-mamba-cache-size`).
    """

    STEP = 0
    PROMPTS = 1
    ROWS = 2
    PAGES = 3
    PAUSE = 4
    ADAPTER = 5
    SHARED = 6
    STATES = 7


class ChunkTime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a prompt that a step computed.

    Attributes:
        start: the part's first position in the prompt.
        num_tokens: the part's length in tokens.
        planned_at: when the part's step was planned, `time.monotonic()`.
    """

    start: int
    num_tokens: int
    planned_at: float


class Neighbor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The slowest step that computed prompts while a request decoded.

    Attributes:
        step_s: duration of the step, seconds.
        num_prompt_tokens: prompt tokens that the step computed, of all requests together.
        request_id: id of the request with the longest prompt chunk in the step.
    """

    step_s: float
    num_prompt_tokens: int
    request_id: int


class PrefixBreak(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The position at which a prompt leaves the prefix cache, found when it is admitted.

    Attributes:
        index: the first position that no cached prompt has. If many cached prompts continue with
            different tokens, `index` is the beginning of a page.
        differs: whether cached prompts continue with another token there; otherwise they end there.
    """

    index: int
    differs: bool


class WorkerTimes(msgspec.Struct, array_like=True, gc=False):
    """One request in one worker; times are `time.monotonic()`, 0 for what never happened.

    Attributes:
        received_at: when the scheduler read the request's message.
        queued_at: when its grammar, if any, was loaded.
        admitted_at: when the request left the queue.
        prompt_done_at: when its prompt was computed and its first token was known.
        ended_at: when the scheduler ended the request.
        waits: seconds in the queue, by `Wait`; without the seconds after a retraction.
        chunks: the first chunks of its prompt.
        num_chunks: number of all chunks of its prompt.
        num_computed: prompt tokens that were not cached, recomputed ones included.
        tower_s: seconds of steps that computed images, before `prompt_done_at`.
        plain_steps, plain_s: number and seconds of the steps from `prompt_done_at` on that only
            decoded.
        mixed_steps, mixed_s: number and seconds of the steps from `prompt_done_at` on that computed
            prompts of other requests as well.
        neighbor: the slowest of these mixed steps.
        read_after: the step after which the message was read, if it computed prompts.
        usual_step_s: mean duration of the worker's steps that only decoded.
        num_retractions: how often the request lost its pages.
        retracted_s: seconds from each retraction until its tokens were computed again.
        cached_tokens: tokens from the prefix cache at its first admission.
        prefix: where its prompt left the cache; `None` if the whole prompt is cached, or if there
            is no prefix cache.
        is_cache_empty: whether its namespace of the cache was empty.
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
    """The requests that have ended since the last such message."""

    ended: list[WorkerTimes]
