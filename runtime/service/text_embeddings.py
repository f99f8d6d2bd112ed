"""Vectors of texts: admitted like every request, run in batches with others', or refused whole."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from runtime.client.generation_stream import GenerationInput, GenerationStream
from runtime.client.tokenization import encode_prompts
from runtime.errors import HeadraceError, InvalidRequest
from runtime.extras.pooled.front import VECTOR, VectorAnswer
from runtime.ipc.messages import FinishReason
from runtime.requests.request_spec import RequestSpec
from runtime.requests.sampling_params import SamplingParams, check_priority
from runtime.service.context import ServiceContext
from runtime.service.streams import close_all, open_streams

MAX_INPUTS = 2048
# A text is computed, and nothing is generated after it.
_NOTHING = SamplingParams(max_new_tokens=0, temperature=0.0)


class EmbeddingAborted(HeadraceError):
    """Somebody aborted the request before every text had its vector."""

    status_code = 400


@dataclass(frozen=True)
class Embedding:
    """One text's vector.

    Attributes:
        numbers: `[hidden_size]` float32.
        latency_s: from admission to the vector.
    """

    numbers: array[float]
    rid: str
    prompt_tokens: int
    finish_reason: FinishReason
    weight_version: str
    latency_s: float


class EmbeddingMeta(TypedDict):
    """What is known of a vector; `e2e_latency` in seconds."""

    id: str
    finish_reason: FinishReason
    prompt_tokens: int
    weight_version: str
    e2e_latency: float


class EmbeddingAnswer(TypedDict):
    """One vector in the words of the native API and the engine."""

    embedding: list[float]
    meta_info: EmbeddingMeta


def vector_input(
    input_ids: list[int], rid: str, *, priority: int = 0, dp_rank: int | None = None
) -> GenerationInput:
    """The request for one text's vector."""
    spec = RequestSpec(
        sampling=_NOTHING, rid=rid, priority=priority, extras=[VECTOR], dp_rank=dp_rank
    )
    return GenerationInput(input_ids, spec)


def _rids(rid: str | Sequence[str] | None, count: int) -> list[str]:
    """A name for each of `count` texts; aborting a single given name reaches them all.

    Raises:
        InvalidRequest: a list of names of another length.
    """
    if rid is not None and not isinstance(rid, str):
        if len(rid) != count:
            raise InvalidRequest(f"rid must have one name for each of {count} inputs.", param="rid")
        return list(rid)
    first = rid or secrets.token_hex(16)
    return [first] if count == 1 else [f"{first}_{index}" for index in range(count)]


def _check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Refuse shortened vectors: only Matryoshka models give them, and this one says nothing of it.

    Raises:
        InvalidRequest: fewer dimensions than the model has are asked for.
    """
    if dimensions not in (None, hidden_size):
        raise InvalidRequest(
            f"dimensions must be {hidden_size}, the model's own: it is no Matryoshka model.",
            param="dimensions",
        )


def describe(found: Embedding) -> dict[str, Any]:
    """One vector in the words of the native API and the engine."""
    return {
        "embedding": found.numbers.tolist(),
        "meta_info": {
            "id": found.rid,
            "finish_reason": msgspec.to_builtins(found.finish_reason),
            "prompt_tokens": found.prompt_tokens,
            "weight_version": found.weight_version,
            "e2e_latency": found.latency_s,
        },
    }


async def embed(
    context: ServiceContext,
    given: Sequence[str | list[int]],
    *,
    rid: str | Sequence[str] | None = None,
    dimensions: int | None = None,
    priority: int = 0,
    dp_rank: int | None = None,
) -> list[Embedding]:
    """The vectors of all texts, in order, or none.

    Args:
        context: the service.
        given: texts or lists of token ids.
        rid: a name for all or one for each.
        dimensions: the vectors' length; only the model's own.
        priority: of the requests, as the scheduler takes it.
        dp_rank: the replica that has to compute them; any where absent.

    Raises:
        InvalidRequest: too many inputs, one that is too long, or the model gives no vectors.
        EmbeddingAborted: one was aborted.
    """
    _check_dimensions(dimensions, context.model.hidden_size)
    check_priority(priority)
    if not 1 <= len(given) <= MAX_INPUTS:
        raise InvalidRequest(
            f"The request must have 1 to {MAX_INPUTS} inputs, got {len(given)}.", param="input"
        )
    limits = context.client.limits
    prompts = await encode_prompts(context.tokenizer, given, limits)
    inputs = [
        vector_input(ids, name, priority=priority, dp_rank=dp_rank)
        for ids, name in zip(prompts, _rids(rid, len(prompts)), strict=True)
    ]
    started = time.perf_counter()
    streams = await open_streams(context.client.generate, inputs, limits)
    try:
        # All of them run meanwhile, whichever is read.
        return [await _read(stream, started) for stream in streams]
    finally:
        close_all(streams)


async def _read(stream: GenerationStream, started: float) -> Embedding:
    answer = VectorAnswer()
    async for chunk in stream:
        answer.add(chunk)
        reason = chunk.finish_reason
    assert reason is not None, "the last chunk says why it is the last"
    if reason.type == "abort":
        raise EmbeddingAborted(reason.message or "Aborted")
    return Embedding(
        numbers=answer.numbers(),
        rid=stream.rid,
        prompt_tokens=chunk.prompt_tokens,
        finish_reason=reason,
        weight_version=chunk.weight_version,
        latency_s=time.perf_counter() - started,
    )
