"""Runs a request through the engine, in the same way for every HTTP API.

`generate` admits the samples that an API has made from its request, and yields their chunks.
`generate_native` takes a decoded body of the native API, and answers in its format.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from runtime.client.answer_size import check_answer_size
from runtime.client.front_extras import AnsweredSample, ExtraAnswer, answers_of
from runtime.client.generation_stream import GenerationChunk, GenerationInput, GenerationStream
from runtime.client.session_store import SessionParams
from runtime.errors import InvalidRequest
from runtime.eventloop.json_pieces import INLINE_COST, JsonItems, Pieces, encode
from runtime.eventloop.time_slices import SLICE_S, Slices
from runtime.ipc.messages import FinishReason
from runtime.requests.random_hex import random_hex
from runtime.requests.sampling_params import SamplingParams
from runtime.service.adapter_names import with_adapters
from runtime.service.context import ServiceContext
from runtime.service.generate_request import GenerateBody, GeneratePlan, plan_body
from runtime.service.image_prompts import encode_with_images
from runtime.text.encoding import encode_prompts

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

# Part of an answer's body: bytes, or an iterator that encodes while sending, if that takes long.
Chunk = bytes | Iterator[bytes]


class Opened(Protocol):
    """An admitted sample."""

    def take_back(self) -> None:
        """Undo the admission; allowed only before any output was read."""


Sample = TypeVar("Sample", bound=Opened)

Indexed = tuple[int, GenerationChunk]

# Admitting a sample costs as much time as handling this many tokens of its prompt, which take about
# forty nanoseconds each.
_SAMPLE_COST = 1000
_INLINE_COST = 50_000


def new_id(prefix: str, rid: str | None) -> str:
    """Return the answer's id: the caller's own, or a new one."""
    return rid if rid is not None else f"{prefix}-{random_hex(16)}"


def sample_rids(rid: str, num_samples: int) -> list[str]:
    """Return the engine's names for the samples; aborting `rid` aborts all of them."""
    return [rid] if num_samples == 1 else [f"{rid}_{index}" for index in range(num_samples)]


class Generation:
    """The samples of one request, admitted together and read as one stream.

    Attributes:
        streams: streams of the samples, in order.
    """

    def __init__(self, streams: list[GenerationStream]) -> None:
        """Hold the streams; only `generate` calls this."""
        self.streams = streams

    def chunks(self) -> AsyncGenerator[Indexed, None]:
        """Return the chunks of all samples in order of arrival, each with its sample's index.

        All samples are aborted if the caller closes the iterator early, or if one sample fails.
        """
        return _merge(self.streams)

    async def begun(self) -> AsyncGenerator[Indexed, None]:
        """Wait for the first chunk, then return an iterator of all chunks.

        A refusal by the scheduler arrives as the first chunk. Because it is awaited here, it
        becomes an HTTP status instead of an event in a stream that began with 200.
        """
        return await _first_then_rest(self.chunks())

    def close(self) -> None:
        """Stop reading, and abort the samples that still run."""
        for stream in self.streams:
            stream.close()


async def generate(
    context: ServiceContext,
    inputs: Sequence[GenerationInput],
    *,
    session: SessionParams | None = None,
) -> Generation:
    """Admit every sample of a request, or none: if one is refused, the others are undone.

    Args:
        context: the server's context.
        inputs: the samples to admit.
        session: the session that they continue, if any.

    Raises:
        InvalidRequest: a sample is refused, or the answer might be too large.
        EngineNotReady, Overloaded: the samples cannot be accepted now.
    """
    check_answer_size(inputs, context.client.limits)
    return Generation(await _open_each(inputs, context.generator(session)))


async def generate_native(
    context: ServiceContext, body: GenerateBody, body_size: int
) -> NativeGeneration:
    """Check a body of the native API, encode its prompts and admit its samples.

    Args:
        context: the server's context.
        body: the decoded body.
        body_size: size of the body, bytes.

    Raises:
        InvalidRequest: the first error.
        TooLong: a prompt is longer than the context or the KV pool.
        EngineNotReady, Overloaded: the request cannot be accepted now.
    """
    vocab_size = context.client.limits.vocab_size
    defaults, features = context.sampling_defaults, context.features
    plan = await plan_body(body, body_size, defaults, vocab_size, features)
    plan = await with_adapters(context, plan)
    encode_all = partial(encode_prompts, context.tokenizer, limits=context.client.limits)
    if plan.images:
        prompt_ids, plan = await encode_with_images(context, plan, encode_all)
    else:
        prompt_ids = await encode_all(plan.prompts)
    return await admit_plan(context, plan, prompt_ids, as_json=True)


async def admit_plan(
    context: ServiceContext,
    plan: GeneratePlan,
    prompt_ids: list[list[int]],
    *,
    as_json: bool = False,
) -> NativeGeneration:
    """Admit every sample of `plan`, or none: if one is refused, the others are undone.

    Args:
        context: the server's context.
        plan: the request.
        prompt_ids: token ids of each of the plan's prompts.
        as_json: whether the answers will be encoded as JSON; their total size is then bounded.
    """
    inputs = [GenerationInput(prompt_ids[each.prompt_index], each.spec) for each in plan.samples]
    if as_json:
        check_answer_size(inputs, context.client.limits)
    outputs = await _open_each(inputs, partial(open_output, context, plan, as_json=as_json))
    return NativeGeneration(outputs, is_single=plan.is_single)


class NativeGeneration(Generation):
    """A request whose chunks are answers in the native API's format."""

    def __init__(self, outputs: list[Output], *, is_single: bool) -> None:
        """Hold the outputs. With `is_single`, the answer is one object, else a list."""
        super().__init__([output.stream for output in outputs])
        self._outputs = outputs
        self._is_single = is_single

    async def answers(
        self, *, incremental: bool
    ) -> AsyncGenerator[tuple[GenerationChunk, dict[str, Any]], None]:
        """Yield each chunk with the answer so far, or, if `incremental`, with its new part only."""
        async with contextlib.aclosing(self.chunks()) as chunks:
            async for index, chunk in chunks:
                yield chunk, self._answer(index, chunk, incremental=incremental)

    def _answer(self, index: int, chunk: GenerationChunk, *, incremental: bool) -> dict[str, Any]:
        answer = self._outputs[index].answer(chunk, incremental=incremental)
        return answer if self._is_single else {**answer, "index": index}

    async def whole(self) -> list[dict[str, Any]]:
        """Wait until all samples have ended; return the complete answer of each."""
        answers: list[dict[str, Any]] = [{}] * len(self._outputs)
        async with contextlib.aclosing(self.chunks()) as chunks:
            async for index, chunk in chunks:
                answers[index] = self._outputs[index].answer(chunk)
        return answers

    async def whole_json(self) -> dict[str, Any] | JsonItems:
        """Return `whole()` ready for JSON: an object for one sample of one prompt, else a list."""
        answers = await self.whole()
        return answers[0] if self._is_single else as_pieces(answers)

    async def events(self, *, incremental: bool) -> AsyncGenerator[Chunk, None]:
        """Wait for the first answer, which may be a refusal; then return events for all answers."""
        return await _first_then_rest(self._events(incremental))

    async def _events(self, incremental: bool) -> AsyncGenerator[Chunk, None]:
        # This repeats `answers`, because one generator more would slow down every token.
        async with contextlib.aclosing(self.chunks()) as chunks:
            async for index, chunk in chunks:
                yield event(self._answer(index, chunk, incremental=incremental))


async def _open_each(
    inputs: Sequence[GenerationInput], open_one: Callable[[GenerationInput], Sample]
) -> list[Sample]:
    """Call `open_one` for each input; if one call fails, undo the others. Long work is sliced."""
    if len(inputs) == 1:
        return [open_one(inputs[0])]
    opened: list[Sample] = []
    try:
        async with _slices_for(inputs) as slices:
            for item in inputs:
                opened.append(open_one(item))
                await slices.step()
    except BaseException:
        for each in opened:
            each.take_back()
        raise
    return opened


def _slices_for(inputs: Sequence[GenerationInput]) -> Slices:
    """Return the slices in which to admit `inputs`."""
    cost = sum(_SAMPLE_COST + len(item.input_ids) for item in inputs)
    return Slices(is_long=cost > _INLINE_COST)


async def _merge(streams: Sequence[GenerationStream]) -> AsyncGenerator[Indexed, None]:
    """Yield the chunks of all streams as they arrive; see `Generation.chunks`."""
    try:
        if len(streams) == 1:
            async for chunk in streams[0]:
                yield 0, chunk
            return
        async with contextlib.aclosing(_merge_many(streams)) as merged:
            async for indexed in merged:
                yield indexed
    finally:
        for stream in streams:
            stream.close()


async def _merge_many(streams: Sequence[GenerationStream]) -> AsyncGenerator[Indexed, None]:
    # Chunks are not queued here: a stream that waits to be read joins its new tokens to one chunk.
    ready: deque[int] = deque()
    is_waiting = [False] * len(streams)
    has_ready = asyncio.Event()

    def mark(index: int) -> None:
        if not is_waiting[index]:
            is_waiting[index] = True
            ready.append(index)
            has_ready.set()

    for index, stream in enumerate(streams):
        stream.listen(partial(mark, index))
    num_open = len(streams)
    since = time.monotonic()
    while num_open:
        if not ready:
            has_ready.clear()
            await has_ready.wait()
            since = time.monotonic()
        elif time.monotonic() - since > SLICE_S:
            # All streams of a large batch may be ready at once, so other tasks get a turn here.
            await asyncio.sleep(0)
            since = time.monotonic()
        index = ready.popleft()
        is_waiting[index] = False
        chunk = await anext(streams[index])
        num_open -= chunk.finish_reason is not None
        yield index, chunk


async def _first_then_rest(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Wait for the first item, then return a generator of all items.

    A refusal by the scheduler arrives as the first item. Because it is awaited here, it becomes an
    HTTP status instead of an event in a stream that began with 200.
    """
    first = await anext(items)

    async def all_items() -> AsyncGenerator[T, None]:
        async with contextlib.aclosing(items):
            yield first
            async for item in items:
                yield item

    return all_items()


class Output:
    """The answer of one sample so far, in the format of the native API."""

    def __init__(
        self,
        stream: GenerationStream,
        rid: str,
        prompt_token_ids: list[int] | None,
        extras: Sequence[ExtraAnswer] = (),
        *,
        num_image_tokens: int = 0,
        tells_rank: bool = False,
        has_text: bool = True,
    ) -> None:
        """Start with an empty answer.

        Args:
            stream: the stream of the sample's chunks.
            rid: the request's name.
            prompt_token_ids: the prompt's ids, if the answer is to repeat them.
            extras: collect the requested extra outputs, such as log-probabilities.
            num_image_tokens: number of the prompt's tokens that stand for images.
            tells_rank: whether the answer gives the replica's number, as `dp_rank`.
            has_text: whether the server has a tokenizer, and thus the answer a text.
        """
        self._has_text = has_text
        self._num_image_tokens = num_image_tokens
        self._tells_rank = tells_rank
        self._extras = extras
        self.stream = stream
        self.rid = rid
        self._prompt_token_ids = prompt_token_ids
        self._started_at = time.perf_counter()
        self._text = ""
        self._output_ids: list[int] = []
        self._completion_tokens = 0

    def answer(self, chunk: GenerationChunk, *, incremental: bool = False) -> dict[str, Any]:
        """Add `chunk` and return the answer so far, or, if `incremental`, only its new part."""
        self._completion_tokens += len(chunk.token_ids)
        for extra in self._extras:
            extra.add(chunk, incremental=incremental)
        if incremental:
            self._text, self._output_ids = chunk.text, chunk.token_ids
        else:
            self._text += chunk.text
            # This is a new list, because a caller in this process may keep the previous answer.
            self._output_ids = [*self._output_ids, *chunk.token_ids]
        answer: dict[str, Any] = {
            **({"text": self._text} if self._has_text else {}),
            "output_ids": self._output_ids,
            "meta_info": self._meta_info(chunk),
        }
        if self._prompt_token_ids is not None:
            answer["prompt_token_ids"] = self._prompt_token_ids
        return answer

    def take_back(self) -> None:
        """Undo the admission; allowed only before any output was read."""
        self.stream.take_back()

    def _meta_info(self, chunk: GenerationChunk) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": describe_finish(chunk.finish_reason),
            "prompt_tokens": chunk.prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "cached_tokens": chunk.cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": chunk.weight_version,
            "total_retractions": chunk.num_retractions,
        }
        if self._num_image_tokens:
            meta["image_tokens"] = self._num_image_tokens
        if self._tells_rank:
            meta["dp_rank"] = self.stream.dp_rank
        for extra in self._extras:
            meta.update(extra.meta_info())
        if chunk.finish_reason is not None:
            meta["e2e_latency"] = time.perf_counter() - self._started_at
            meta["response_sent_to_client_ts"] = time.time()
            for extra in self._extras:
                meta.update(extra.at_end())
        return meta


def describe_finish(reason: FinishReason | None) -> dict[str, Any] | None:
    """Return the `finish_reason` of the native API: `null` while the request runs."""
    if reason is None:
        return None
    described: dict[str, Any] = msgspec.to_builtins(reason)
    return described


def _refuse_text_rules(sampling: SamplingParams) -> None:
    for name in ("stop", "stop_regex", "min_new_tokens"):
        if getattr(sampling, name):
            raise InvalidRequest(
                f"{name} needs a tokenizer, and this server was started with "
                "--skip-tokenizer-init; stop_token_ids works.",
                param=name,
            )


def open_output(
    context: ServiceContext, plan: GeneratePlan, item: GenerationInput, *, as_json: bool = False
) -> Output:
    """Admit one sample of `plan`.

    Args:
        context: the server's context.
        plan: the request.
        item: the sample.
        as_json: whether the answers will be encoded as JSON; else they hold Python lists.

    Raises:
        InvalidRequest: the sample can never fit, or a running request has its `rid`.
        EngineNotReady, Overloaded: the request cannot be accepted now.
    """
    if context.tokenizer.is_missing:
        _refuse_text_rules(item.spec.sampling)
    stream = context.generator(plan.session, is_recorded=plan.is_recorded)(item)
    # A session puts its context in front of the request's prompt.
    input_ids = item.input_ids if stream.turn is None else stream.turn.prompt().tolist()
    extras: list[ExtraAnswer] = []
    if item.spec.extras:
        answered = AnsweredSample(
            input_ids[: stream.prompt_tokens],
            context.model.hidden_size,
            lambda token_id: context.token_pieces.text(token_id),
            as_json=as_json,
            is_shown_again=plan.stream,
        )
        extras = answers_of(item.spec.extras, answered)
    return Output(
        stream,
        item.spec.rid,
        input_ids if plan.return_prompt_token_ids else None,
        extras,
        num_image_tokens=sum(each.image.num_tokens for each in item.spec.images),
        tells_rank=len(context.client.links) > 1,
        has_text=not context.tokenizer.is_missing,
    )


def as_pieces(answers: list[dict[str, Any]]) -> JsonItems:
    """Return the complete answers as a JSON list that is encoded one answer at a time."""
    cost = 0
    for answer in answers:
        cost += 1 + len(answer["output_ids"]) + len(answer.get("prompt_token_ids", ()))
        numbers = answer["meta_info"].values()
        cost += sum(each.cost for each in numbers if isinstance(each, Pieces))
        # The list already counts as large; adding up thousands of further answers would take long.
        if cost > INLINE_COST:
            break
    return JsonItems(answers, cost)


def event(content: Mapping[str, object]) -> Chunk:
    """Return a server-sent event with `content` as JSON, in which lists may be `Pieces`."""
    data = encode(content)
    if isinstance(data, bytes):
        return b"data: " + data + b"\n\n"
    return itertools.chain((b"data: ",), data, (b"\n\n",))


def named_event(name: str, content: Mapping[str, object]) -> Chunk:
    """Return a server-sent event as `event` does, with a line for the event's name."""
    head = b"event: " + name.encode() + b"\n"
    payload = event(content)
    return head + payload if isinstance(payload, bytes) else itertools.chain((head,), payload)


def joined(chunks: Sequence[Chunk]) -> Iterable[Chunk]:
    """Return the same content, with adjacent chunks of bytes joined into one."""
    return chunks if len(chunks) == 1 else _joined(chunks)


def _joined(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    ready: list[bytes] = []
    for chunk in chunks:
        if isinstance(chunk, bytes):
            ready.append(chunk)
            continue
        if ready:
            yield b"".join(ready)
            ready = []
        yield chunk
    if ready:
        yield b"".join(ready)
