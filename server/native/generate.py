"""`/generate`: text or token ids in, text out; whole or as a stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from functools import partial

import msgspec
from fastapi import Request
from starlette.responses import Response

from openai_api.operation import events_of, json_of, operation
from runtime.client.json_body import let_go, read_json
from runtime.client.tokenization import encode_prompts
from runtime.errors import TooLong
from runtime.service.context import ServiceContext
from runtime.service.events import DONE, Chunk, event
from runtime.service.generate_answer import GenerateAnswer
from runtime.service.generate_request import GenerateBody, GeneratePlan
from runtime.service.image_prompts import encode_with_images
from runtime.service.outputs import (
    Output,
    as_pieces,
    open_outputs,
    plan_body,
    read_all,
)
from runtime.service.streams import Indexed, close_all, first_then_rest, merge
from server.access import Access, AccessRouter
from server.error_responses import StreamErrorBody, stream_error
from server.event_stream import EventStream, json_answer, unless_disconnected, with_errors
from server.request_body import read_raw

_EVENTS = (GenerateAnswer, StreamErrorBody)
_DECODER = msgspec.json.Decoder(GenerateBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """The route `/generate`."""
    router = AccessRouter(Access.KEY, tags=["native"])

    async def generate(request: Request) -> Response:
        """Continue one prompt (the answer is an object) or several (a list)."""
        raw = await read_raw(request)
        body = await read_json(raw, _DECODER)
        try:
            return await answer(request, body, len(raw))
        finally:
            let_go(body.input_ids)

    async def answer(request: Request, body: GenerateBody, body_size: int) -> Response:
        plan = await plan_body(context, body, body_size)
        try:
            if plan.images:
                encode = partial(encode_prompts, context.tokenizer, limits=context.client.limits)
                prompt_ids, plan = await encode_with_images(context, plan, encode)
            else:
                prompt_ids = await encode_prompts(
                    context.tokenizer, plan.prompts, context.client.limits
                )
            outputs = await open_outputs(context, plan, prompt_ids, as_json=True)
        except TooLong as error:
            if not plan.stream:
                raise
            # The reference measures a prompt behind the status line, so clients look for this one
            # mistake in the stream. One member that is too long refuses its whole batch.
            return EventStream(_refusal(error), lambda: None)
        streams = [output.stream for output in outputs]
        try:
            if not plan.stream:
                answers = await unless_disconnected(request.receive, read_all(outputs))
                return json_answer(answers[0] if plan.is_single else as_pieces(answers))
            # The first chunk is awaited before the status is sent: a refusal keeps its own status.
            chunks = await unless_disconnected(request.receive, first_then_rest(merge(streams)))
        except BaseException:
            close_all(streams)
            raise
        incremental = context.config.http.incremental_streaming_output
        events = _events(outputs, plan, incremental, chunks)
        return EventStream(with_errors(events, _error_event), lambda: close_all(streams))

    whole, streamed = json_of(GenerateAnswer, list[GenerateAnswer]), events_of(*_EVENTS)
    documented = operation(GenerateBody, ok={**whole, **streamed}, refuses=(404,))
    router.add_api_route("/generate", generate, methods=["POST", "PUT"], openapi_extra=documented)
    return router


async def _events(
    outputs: list[Output],
    plan: GeneratePlan,
    incremental: bool,
    chunks: AsyncGenerator[Indexed, None],
) -> AsyncGenerator[Chunk, None]:
    async with contextlib.aclosing(chunks):
        async for index, chunk in chunks:
            answer = outputs[index].answer(chunk, incremental=incremental)
            yield event(answer if plan.is_single else {**answer, "index": index})


async def _refusal(error: Exception) -> AsyncGenerator[Chunk, None]:
    yield _error_event(error)
    yield DONE


def _error_event(error: Exception) -> Chunk:
    return event(stream_error(error))
