"""`/generate`: text or token ids in, text out; whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from fastapi import Request
from starlette.responses import Response

from openai_api.access import Access, AccessRouter
from openai_api.sse import DONE, EventStream, event, unless_disconnected, with_errors
from runtime.client.json_body import decode_body
from runtime.errors import TooLong
from runtime.service.context import ServiceContext
from runtime.service.generate_request import GenerateBody, GeneratePlan, plan_generate
from runtime.service.outputs import (
    Output,
    open_outputs,
    read_all,
    tokenize_prompts,
)
from runtime.service.streams import close_all, first_then_rest, merge
from server.error_responses import json_response, stream_error
from server.native.schema import body_schema

_DECODER = msgspec.json.Decoder(GenerateBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """The route `/generate`."""
    router = AccessRouter(Access.KEY, tags=["native"])

    async def generate(request: Request) -> Response:
        """Continue one prompt (the answer is an object) or several (a list)."""
        body = decode_body(await request.body(), _DECODER)
        plan = plan_generate(
            body,
            context.sampling_defaults,
            context.client.limits.vocab_size,
            features=context.features,
        )
        try:
            outputs = open_outputs(context, plan, await tokenize_prompts(context, plan))
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
                return json_response(answers[0] if plan.is_single else answers)
            events = _events(outputs, plan, context.config.http.incremental_streaming_output)
            # The first event is awaited before the status is sent: a refusal keeps its own status.
            events = await unless_disconnected(request.receive, first_then_rest(events))
        except BaseException:
            close_all(streams)
            raise
        return EventStream(with_errors(events, _error_event), lambda: close_all(streams))

    documented = body_schema(GenerateBody)
    router.add_api_route("/generate", generate, methods=["POST"], openapi_extra=documented)
    router.add_api_route("/generate", generate, methods=["PUT"], include_in_schema=False)
    return router


async def _events(
    outputs: list[Output], plan: GeneratePlan, incremental: bool
) -> AsyncGenerator[bytes, None]:
    async for index, chunk in merge([output.stream for output in outputs]):
        answer = outputs[index].answer(chunk, incremental=incremental)
        await outputs[index].end_json(answer)
        yield event(answer if plan.is_single else {**answer, "index": index})


async def _refusal(error: Exception) -> AsyncGenerator[bytes, None]:
    yield _error_event(error)
    yield DONE


def _error_event(error: Exception) -> bytes:
    return event(stream_error(error))
