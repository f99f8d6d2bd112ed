"""Computes vectors and scores of texts. A request's texts are admitted or refused together."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import msgspec

from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.sentence_transformers import FILE
from runtime.client.front_extras import ExtraAnswer, check_kind
from runtime.client.generation_stream import (
    GenerationChunk,
    GenerationInput,
)
from runtime.errors import HeadraceError, InvalidRequest
from runtime.extras.pooled.front import VectorAnswer
from runtime.extras.pooled.parts import VECTOR, behind_prompt, of_pair
from runtime.ipc.messages import FinishReason
from runtime.requests.extra_spec import ExtraSpec
from runtime.requests.random_hex import random_hex
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams, check_priority
from runtime.service.context import ServiceContext
from runtime.service.generation import Generation, generate
from runtime.service.prefills import MAX_TOKENS_TOGETHER, check_tokens_together
from runtime.text.encoding import check_num_chars, encode_pairs, encode_prompts, encode_texts
from runtime.text.tokenizer import Tokenizer

# The most prompt names that an error message lists.
_MAX_LISTED = 32


def choose_prompt(model: ModelSpec, prompt: str | None, name: str | None) -> str:
    """Return the text to put before each text of a request; empty for none.

    Args:
        model: the model, which may define prompts that requests choose by name.
        prompt: the text itself; an empty one turns the model's default prompt off.
        name: name of one of the model's prompts, given instead of `prompt`.

    Raises:
        InvalidRequest: both `prompt` and `name` are given, the name is unknown, or the model does
            not give vectors.
    """
    given = "prompt_name" if name is not None else "prompt"
    if prompt is not None and name is not None:
        raise InvalidRequest("Give prompt or prompt_name, not both.", param=given)
    if prompt is None and name is None:
        return model.prompts.by_name.get(model.prompts.default, "")
    if model.gives != "vectors":
        raise InvalidRequest(f"{given} is for models that give vectors.", param=given)
    if name is None:
        return prompt or ""
    prompts = model.prompts.by_name
    if name in prompts:
        return prompts[name]
    if not prompts:
        raise InvalidRequest(
            f"prompt_name must be absent: the model's folder names no prompts ({FILE}).",
            param=given,
        )
    names = ", ".join(list(prompts)[:_MAX_LISTED])
    raise InvalidRequest(f"prompt_name must be one of {names}; got {name[:64]!r}.", param=given)


async def count_prompt_tokens(tokenizer: Tokenizer, prompt: str) -> int:
    """Return the number of tokens in front of a text: start tokens, and those of `prompt`.

    As in sentence-transformers, `prompt` is encoded alone, and the token that ends a text is not
    counted.
    """
    (ids,) = await encode_texts(tokenizer, [prompt])
    ends = bool(ids) and ids[-1] in tokenizer.special_ids
    return len(ids) - int(ends)


A = TypeVar("A", bound=ExtraAnswer)
T = TypeVar("T")

MAX_INPUTS = 2048
# Sampling parameters of a request that only computes its prompt.
_NOTHING = SamplingParams(max_new_tokens=0, temperature=0.0)


# One input: a text, its token ids, or two texts to compare.
TextInput = str | list[int] | tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of a request for vectors or scores of texts.

    Attributes:
        rid: a name for all texts, or one for each.
        dimensions: the vectors' length, one that the model was trained for.
        prompt: text that is put before each text; an empty text disables the model's default
            prompt.
        prompt_name: name of one of the model's prompts, given instead of `prompt`.
        priority: the requests' priority, for the scheduler.
        dp_rank: the replica that must compute the texts; `None` for any.
        truncate: whether a text that is too long is cut; `None` for the server's default.
    """

    rid: str | Sequence[str] | None = None
    dimensions: int | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    priority: int = 0
    dp_rank: int | None = None
    truncate: bool | None = None


_AS_IT_IS = TextOptions()


class EmbeddingAborted(HeadraceError):
    """The request was aborted before every text had its vector."""

    status_code = 400


@dataclass(frozen=True)
class Embedding:
    """The vector or the scores of one text.

    Attributes:
        numbers: `[output_size]` float32, or the shorter length that the request asked for.
        rid: name of the text's request.
        prompt_tokens: number of the text's tokens.
        finish_reason: why the computation ended.
        weight_version: label of the weights that computed the text.
        latency_s: seconds from admission to the result.
    """

    numbers: array[float]
    rid: str
    prompt_tokens: int
    finish_reason: FinishReason
    weight_version: str
    latency_s: float


class EmbeddingMeta(TypedDict):
    """Information about a vector; `e2e_latency` is in seconds."""

    id: str
    finish_reason: FinishReason
    prompt_tokens: int
    weight_version: str
    e2e_latency: float


class EmbeddingAnswer(TypedDict):
    """One vector in the format of the native API and of the offline engine."""

    embedding: list[float]
    meta_info: EmbeddingMeta


def vector_input(
    input_ids: list[int], rid: str, extra: ExtraSpec = VECTOR, options: TextOptions = _AS_IT_IS
) -> GenerationInput:
    """Return the engine's request for one text; `extra` says whether it is for vector or scores."""
    spec = RequestSpec(
        row=RowSpec(sampling=_NOTHING, extras=[extra]),
        rid=rid,
        priority=options.priority,
        dp_rank=options.dp_rank,
    )
    return GenerationInput(input_ids, spec)


def _rids(rid: str | Sequence[str] | None, count: int) -> list[str]:
    """Return a request id for each of `count` texts.

    If `rid` is a string, the ids are made from it, so that aborting `rid` aborts all texts.

    Raises:
        InvalidRequest: the list of names has a different length.
    """
    if rid is not None and not isinstance(rid, str):
        if len(rid) != count:
            raise InvalidRequest(f"rid must have one name for each of {count} inputs.", param="rid")
        return list(rid)
    first = rid or random_hex(16)
    return [first] if count == 1 else [f"{first}_{index}" for index in range(count)]


def _check_dimensions(dimensions: int | None, model: ModelSpec) -> None:
    """Refuse a vector length that the model was not trained for (Matryoshka, arXiv 2205.13147).

    Raises:
        InvalidRequest: the model does not give vectors of this length.
    """
    full = model.output_size
    if dimensions is not None and model.gives != "vectors":
        raise InvalidRequest("dimensions is for models that give vectors.", param="dimensions")
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
            "Matryoshka model (is_matryoshka, matryoshka_dimensions), and neither does "
            "--json-model-override-args of the server.",
            param="dimensions",
        )
    if not 1 <= dimensions <= full:
        raise InvalidRequest(f"dimensions must be from 1 to {full}.", param="dimensions")


def _shortened(numbers: array[float], dimensions: int | None) -> array[float]:
    """Return the first `dimensions` numbers of a vector, scaled to unit length again."""
    if dimensions in (None, len(numbers)):
        return numbers
    short = numbers[:dimensions]
    norm = math.hypot(*short) or 1.0
    return array("f", [number / norm for number in short])


def describe(found: Embedding) -> dict[str, Any]:
    """Return one vector in the format of the native API and of the offline engine."""
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
    context: ServiceContext, given: Sequence[TextInput], options: TextOptions = _AS_IT_IS
) -> list[Embedding]:
    """Return the vectors or scores of all texts, in order; one failure fails them all.

    Args:
        context: the service.
        given: texts, lists of token ids, or pairs of texts.
        options: the request's options.

    Raises:
        InvalidRequest: there are too many inputs, an input is too long, or the model gives neither
            vectors nor scores of whole texts.
        EmbeddingAborted: a text was aborted.
    """
    check_priority(options.priority)
    # The kind of model is checked before time is spent on encoding texts.
    check_kind([VECTOR], context.client.limits)
    if context.model.pooling.per_token:
        raise InvalidRequest(
            "This server's model gives a vector for each token, not for a whole text: use /pooling."
        )
    _check_dimensions(options.dimensions, context.model)
    started = time.perf_counter()
    generation = await open_texts(context, given, options)

    def made_of(rid: str, answer: VectorAnswer, end: GenerationChunk) -> Embedding:
        assert end.finish_reason is not None, "it is the last"
        return Embedding(
            numbers=_shortened(answer.numbers(), options.dimensions),
            rid=rid,
            prompt_tokens=end.prompt_tokens,
            finish_reason=end.finish_reason,
            weight_version=end.weight_version,
            latency_s=time.perf_counter() - started,
        )

    return await read_texts(generation, VectorAnswer, made_of)


async def open_texts(
    context: ServiceContext,
    given: Sequence[TextInput],
    options: TextOptions,
    extra: ExtraSpec | None = None,
) -> Generation:
    """Admit all texts, or none if one is refused; errors are those of `embed`.

    Args:
        context: the service.
        given: texts, lists of token ids, or pairs of texts.
        options: the request's options.
        extra: the output to compute for each text; `None` for its vector or scores.
    """
    if not 1 <= len(given) <= MAX_INPUTS:
        raise InvalidRequest(
            f"The request must have 1 to {MAX_INPUTS} inputs, got {len(given)}.", param="input"
        )
    encoded = await _encode(context, given, options)
    if len(encoded) > 1:
        num_tokens = sum(len(ids) for ids, _ in encoded)
        check_tokens_together(context, num_tokens, MAX_TOKENS_TOGETHER, "input")
    inputs = [
        vector_input(ids, name, extra or of_text, options)
        for (ids, of_text), name in zip(encoded, _rids(options.rid, len(encoded)), strict=True)
    ]
    return await generate(context, inputs)


async def _encode(
    context: ServiceContext, given: Sequence[TextInput], options: TextOptions
) -> list[tuple[list[int], ExtraSpec]]:
    """Return each input's token ids, and the `ExtraSpec` that requests its vector or scores."""
    limits, tokenizer = context.client.limits, context.tokenizer
    if options.truncate is not None:
        limits = dataclasses.replace(limits, allow_auto_truncate=options.truncate)
    prompt = choose_prompt(context.model, options.prompt, options.prompt_name)
    pairs = [each for each in given if isinstance(each, tuple)]
    if pairs and context.model.gives != "scores":
        raise InvalidRequest(
            "Pairs of texts need a model that scores them; this one gives vectors.", param="text"
        )
    others = [each for each in given if not isinstance(each, tuple)]
    texts = [each for each in others if isinstance(each, str)]
    if len(texts) < len(others):
        if options.prompt or options.prompt_name is not None:
            raise InvalidRequest(
                "A prompt is put before texts only: token ids must include it.", param="prompt"
            )
        # Token ids are used as they are, without a prompt.
        prompt = "" if not texts else prompt
    of_text = VECTOR
    if prompt:
        # The size is checked before the prompt is put before each text, because all texts together
        # could then be a thousand times as long as the body.
        check_num_chars(len(prompt) * len(texts) + sum(map(len, texts)))
        others = [prompt + each if isinstance(each, str) else each for each in others]
        if not context.model.pooling.include_prompt:
            of_text = behind_prompt(await count_prompt_tokens(tokenizer, prompt))
    of_pairs = iter(await encode_pairs(tokenizer, pairs, limits) if pairs else ())
    of_others = iter(await encode_prompts(tokenizer, others, limits) if others else ())
    encoded: list[tuple[list[int], ExtraSpec]] = []
    for each in given:
        if isinstance(each, tuple):
            ids, first_part = next(of_pairs)
            encoded.append((ids, of_pair(first_part)))
        else:
            encoded.append((next(of_others), of_text if isinstance(each, str) else VECTOR))
    return encoded


async def read_texts(
    generation: Generation,
    new_answer: Callable[[], A],
    made_of: Callable[[str, A, GenerationChunk], T],
) -> list[T]:
    """Read each text's result when it ends; return the results in order.

    Args:
        generation: the admitted texts.
        new_answer: makes the object that collects a text's chunks.
        made_of: makes the result from the text's rid, the collecting object and the last chunk.

    Raises:
        EmbeddingAborted: a text was aborted.
    """
    streams = generation.streams
    answers = [new_answer() for _ in streams]
    found: dict[int, T] = {}
    async with contextlib.aclosing(generation.chunks()) as chunks:
        async for index, chunk in chunks:
            answers[index].add(chunk, incremental=False)
            reason = chunk.finish_reason
            if reason is None:
                continue
            if reason.type == "abort":
                raise EmbeddingAborted(reason.message or "Aborted")
            found[index] = made_of(streams[index].rid, answers[index], chunk)
    return [found[index] for index in range(len(streams))]
