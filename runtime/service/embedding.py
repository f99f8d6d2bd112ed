"""Vectors of texts: admitted like every request, run in batches with others', or refused whole."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.client.admission import EngineLimits
from runtime.client.answer_size import check_answer_size
from runtime.client.client import EngineClient
from runtime.client.generation import GenerationInput, GenerationStream
from runtime.client.tokenization import encode_prompts
from runtime.errors import HeadraceError, InvalidRequest
from runtime.extras.pooled.front import VECTOR, VectorAnswer
from runtime.ipc.messages import FinishReason
from runtime.requests.request_spec import RequestSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.text.tokenizer import Tokenizer

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


def vector_input(
    input_ids: list[int], rid: str, *, priority: int = 0, dp_rank: int | None = None
) -> GenerationInput:
    """The request for one text's vector."""
    spec = RequestSpec(
        sampling=_NOTHING, rid=rid, priority=priority, extras=[VECTOR], dp_rank=dp_rank
    )
    return GenerationInput(input_ids, spec)


def rids_for(rid: str | Sequence[str] | None, count: int) -> list[str]:
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


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
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


async def tokenize_inputs(
    tokenizer: Tokenizer, limits: EngineLimits, given: Sequence[str | list[int]]
) -> list[list[int]]:
    """Token ids of each text or list of ids, in order.

    Raises:
        InvalidRequest: too many inputs, or a text that is far too long.
    """
    if not 1 <= len(given) <= MAX_INPUTS:
        raise InvalidRequest(
            f"The request must have 1 to {MAX_INPUTS} inputs, got {len(given)}.", param="input"
        )
    texts = [each for each in given if isinstance(each, str)]
    encoded = iter(await encode_prompts(tokenizer, texts, limits))
    return [next(encoded) if isinstance(each, str) else each for each in given]


async def embed(client: EngineClient, inputs: Sequence[GenerationInput]) -> list[Embedding]:
    """Compute the vectors of all `inputs`, in order, or none.

    Raises:
        InvalidRequest: one of them is too long, or the model gives no vectors.
        EmbeddingAborted: one was aborted.
    """
    check_answer_size(inputs, client.limits)
    started = time.perf_counter()
    streams: list[GenerationStream] = []
    try:
        for item in inputs:
            streams.append(client.generate(item))  # noqa: PERF401  # those opened must be closed
    except BaseException:
        for stream in streams:
            stream.take_back()
        raise
    try:
        # All of them run meanwhile, whichever is read.
        return [await _read(stream, started) for stream in streams]
    finally:
        for stream in streams:
            stream.close()


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
