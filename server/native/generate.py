"""`/generate`: text or token ids in, text out; whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from openai_api.generation import close_all, merge
from openai_api.sse import DONE, EventStream, event, unless_disconnected
from runtime.client.json_body import decode_body
from server.context import ServerContext
from server.errors import json_response, stream_error
from server.native.generate_request import GenerateBody, GeneratePlan, plan_generate
from server.native.generation import (
    Output,
    add_hidden_states,
    open_outputs,
    read_all,
    tokenize_prompts,
)
from server.native.schema import body_schema

_DECODER = msgspec.json.Decoder(GenerateBody)


def create_router(context: ServerContext) -> APIRouter:
    """The route `/generate`."""
    router = APIRouter(tags=["native"])

    async def generate(request: Request) -> Response:
        """Continue one prompt (the answer is an object) or several (a list)."""
        body = decode_body(await request.body(), _DECODER)
        plan = plan_generate(
            body,
            context.sampling_defaults,
            context.client.limits.vocab_size,
            features=context.features,
        )
        outputs = open_outputs(context, plan, await tokenize_prompts(context, plan))
        streams = [output.stream for output in outputs]
        try:
            if not plan.stream:
                answers = await unless_disconnected(request.receive, _answers(outputs))
                return json_response(answers[0] if plan.is_single else answers)
            events = _events(outputs, plan, context.config.http.incremental_streaming_output)
            # The first event is awaited before the status is sent: a refusal keeps its own status.
            first = await unless_disconnected(request.receive, _next(events))
        except BaseException:
            close_all(streams)
            raise
        return EventStream(_chain(first, events), lambda: close_all(streams))

    documented = body_schema(GenerateBody)
    router.add_api_route("/generate", generate, methods=["POST"], openapi_extra=documented)
    router.add_api_route("/generate", generate, methods=["PUT"], include_in_schema=False)
    return router


async def _answers(outputs: list[Output]) -> list[dict[str, Any]]:
    answers = await read_all(outputs)
    for output, answer in zip(outputs, answers, strict=True):
        await add_hidden_states(output, answer)
    return answers


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _events(
    outputs: list[Output], plan: GeneratePlan, incremental: bool
) -> AsyncGenerator[bytes, None]:
    async for index, chunk in merge([output.stream for output in outputs]):
        answer = outputs[index].answer(chunk, incremental=incremental)
        await add_hidden_states(outputs[index], answer)
        yield event(answer if plan.is_single else {**answer, "index": index})


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for each in rest:
            yield each
    except Exception as error:
        # The status went out with the first event; what is left is an event that says why.
        yield event(stream_error(error))
    finally:
        await rest.aclose()
    yield DONE
