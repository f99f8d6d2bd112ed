"""`/generate`: continues texts or token ids; the answer is sent whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from fastapi import Request
from starlette.responses import Response

from runtime.errors import TooLong
from runtime.eventloop.json_body import let_go, read_json
from runtime.service.context import ServiceContext
from runtime.service.generate_answer import GenerateAnswer
from runtime.service.generate_request import GenerateBody
from runtime.service.generation import DONE, Chunk, event, generate_native
from runtime.service.operation import events_of, json_of, operation
from server.access import Access, AccessRouter
from server.error_responses import StreamErrorBody, stream_error
from server.event_stream import EventStream, json_answer, unless_disconnected, with_errors
from server.request_body import read_raw

_EVENTS = (GenerateAnswer, StreamErrorBody)
_DECODER = msgspec.json.Decoder(GenerateBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of `/generate`."""
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
        try:
            generation = await generate_native(context, body, body_size)
        except TooLong as error:
            if not body.stream:
                raise
            # Clients expect this error in the stream, because SGLang checks the prompt's length
            # after the status line. One prompt that is too long refuses its whole batch.
            return EventStream(_refusal(error), lambda: None)
        try:
            if not body.stream:
                return json_answer(
                    await unless_disconnected(request.receive, generation.whole_json())
                )
            # The status line waits for the first chunk, so that a refusal can still have its own
            # status.
            incremental = context.config.http.incremental_streaming_output
            events = await unless_disconnected(
                request.receive, generation.events(incremental=incremental)
            )
        except BaseException:
            generation.close()
            raise
        return EventStream(with_errors(events, _error_event), generation.close)

    whole, streamed = json_of(GenerateAnswer, list[GenerateAnswer]), events_of(*_EVENTS)
    documented = operation(GenerateBody, ok={**whole, **streamed}, refuses=(404,))
    router.add_api_route("/generate", generate, methods=["POST", "PUT"], openapi_extra=documented)
    return router


async def _refusal(error: Exception) -> AsyncGenerator[Chunk, None]:
    yield _error_event(error)
    yield DONE


def _error_event(error: Exception) -> Chunk:
    return event(stream_error(error))
