"""Vectors and scores of texts: admitted like every request, run in batches, or refused whole."""

from __future__ import annotations

import math
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from runtime.checkpoint.model_spec import ModelSpec
from runtime.client.front_extras import check_kind
from runtime.client.generation_stream import GenerationInput, GenerationStream
from runtime.client.tokenization import encode_pairs, encode_prompts
from runtime.errors import HeadraceError, InvalidRequest
from runtime.extras.pooled.front import VectorAnswer, of_pair
from runtime.ipc.messages import FinishReason
from runtime.requests.request_spec import RequestSpec
from runtime.requests.sampling_params import SamplingParams, check_priority
from runtime.service.context import ServiceContext
from runtime.service.streams import close_all, open_streams

MAX_INPUTS = 2048
# A text is computed, and nothing is generated after it.
_NOTHING = SamplingParams(max_new_tokens=0, temperature=0.0)


# A text, its token ids, or two texts that are compared.
TextInput = str | list[int] | tuple[str, str]


class EmbeddingAborted(HeadraceError):
    """Somebody aborted the request before every text had its vector."""

    status_code = 400


@dataclass(frozen=True)
class Embedding:
    """One text's vector or scores.

    Attributes:
        numbers: `[output_size]` float32; fewer where fewer dimensions were asked for.
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
    input_ids: list[int],
    rid: str,
    *,
    first_part: int = 0,
    priority: int = 0,
    dp_rank: int | None = None,
) -> GenerationInput:
    """The request for one text's numbers, or a pair's, whose first text has `first_part` tokens."""
    spec = RequestSpec(
        sampling=_NOTHING,
        rid=rid,
        priority=priority,
        extras=[of_pair(first_part)],
        dp_rank=dp_rank,
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


def _check_dimensions(dimensions: int | None, model: ModelSpec) -> None:
    """Refuse lengths of vectors that the model was not trained for (Matryoshka, arXiv 2205.13147).

    Raises:
        InvalidRequest: another length than the model gives.
    """
    full = model.output_size
    if dimensions in (None, full):
        return
    allowed = model.raw.get("matryoshka_dimensions")
    if isinstance(allowed, list):
        if dimensions not in allowed:
            raise InvalidRequest(
                f"dimensions must be one of {', '.join(map(str, allowed[:32]))}.",
                param="dimensions",
            )
    elif not model.raw.get("is_matryoshka"):
        raise InvalidRequest(
            f"dimensions must be {full}, the model's own: its config.json does not call it a "
            "Matryoshka model (is_matryoshka, matryoshka_dimensions).",
            param="dimensions",
        )
    if not 1 <= dimensions <= full:
        raise InvalidRequest(f"dimensions must be from 1 to {full}.", param="dimensions")


def _shortened(numbers: array[float], dimensions: int | None) -> array[float]:
    """The first `dimensions` of a vector, of unit length again."""
    if dimensions in (None, len(numbers)):
        return numbers
    short = numbers[:dimensions]
    norm = math.hypot(*short) or 1.0
    return array("f", [number / norm for number in short])


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
    given: Sequence[TextInput],
    *,
    rid: str | Sequence[str] | None = None,
    dimensions: int | None = None,
    priority: int = 0,
    dp_rank: int | None = None,
) -> list[Embedding]:
    """The vectors or scores of all texts, in order, or none.

    Args:
        context: the service.
        given: texts, lists of token ids, or pairs of texts.
        rid: a name for all or one for each.
        dimensions: the vectors' length, of those that the model was trained for.
        priority: of the requests, as the scheduler takes it.
        dp_rank: the replica that has to compute them; any where absent.

    Raises:
        InvalidRequest: too many inputs, one that is too long, or the model gives no vectors.
        EmbeddingAborted: one was aborted.
    """
    _check_dimensions(dimensions, context.model)
    check_priority(priority)
    if not 1 <= len(given) <= MAX_INPUTS:
        raise InvalidRequest(
            f"The request must have 1 to {MAX_INPUTS} inputs, got {len(given)}.", param="input"
        )
    limits = context.client.limits
    # The kind of model is checked before time goes into texts.
    check_kind([of_pair(0)], limits)
    encoded = await _encode(context, given)
    inputs = [
        vector_input(ids, name, first_part=first, priority=priority, dp_rank=dp_rank)
        for (ids, first), name in zip(encoded, _rids(rid, len(encoded)), strict=True)
    ]
    started = time.perf_counter()
    streams = await open_streams(context.client.generate, inputs, limits)
    try:
        # All of them run meanwhile, whichever is read.
        return [await _read(stream, started, dimensions) for stream in streams]
    finally:
        close_all(streams)


async def _encode(
    context: ServiceContext, given: Sequence[TextInput]
) -> list[tuple[list[int], int]]:
    """Token ids of each input, and how many are of a pair's first text."""
    limits = context.client.limits
    pairs = [each for each in given if isinstance(each, tuple)]
    others = [each for each in given if not isinstance(each, tuple)]
    if pairs and context.model.gives != "scores":
        raise InvalidRequest(
            "Pairs of texts need a model that scores them; this one gives vectors.", param="text"
        )
    of_pairs = iter(await encode_pairs(context.tokenizer, pairs, limits) if pairs else ())
    of_others = iter(await encode_prompts(context.tokenizer, others, limits) if others else ())
    return [next(of_pairs) if isinstance(each, tuple) else (next(of_others), 0) for each in given]


async def _read(stream: GenerationStream, started: float, dimensions: int | None) -> Embedding:
    answer = VectorAnswer()
    async for chunk in stream:
        answer.add(chunk)
        reason = chunk.finish_reason
    assert reason is not None, "the last chunk says why it is the last"
    if reason.type == "abort":
        raise EmbeddingAborted(reason.message or "Aborted")
    return Embedding(
        numbers=_shortened(answer.numbers(), dimensions),
        rid=stream.rid,
        prompt_tokens=chunk.prompt_tokens,
        finish_reason=reason,
        weight_version=chunk.weight_version,
        latency_s=time.perf_counter() - started,
    )
