"""`/generate`: text or token ids in, text out; whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from openai_api.generation import close_all, merge
from openai_api.sse import DONE, EventStream, event, unless_disconnected
from runtime.client.admission import check_text_size
from runtime.client.client import GenerationChunk, GenerationInput, GenerationStream
from runtime.client.json_body import decode_body
from runtime.messages import FinishReason
from server.context import ServerContext
from server.errors import json_response, stream_error
from server.native.generate_request import GenerateBody, GeneratePlan, plan_generate
from server.native.schema import body_schema

_DECODER = msgspec.json.Decoder(GenerateBody)


def create_router(context: ServerContext) -> APIRouter:
    """The route `/generate`."""
    router = APIRouter(tags=["native"])

    async def generate(request: Request) -> Response:
        """Continue one prompt (the answer is an object) or several (a list)."""
        body = decode_body(await request.body(), _DECODER)
        plan = plan_generate(body, context.sampling_defaults, context.client.limits.vocab_size)
        outputs = _open(context, plan, await _tokenize(context, plan))
        streams = [output.stream for output in outputs]
        try:
            if not plan.stream:
                answers = await unless_disconnected(request.receive, _read_all(outputs))
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


class Output:
    """One sample's answer so far, in the words of the native API."""

    def __init__(
        self,
        stream: GenerationStream,
        rid: str,
        weight_version: str,
        prompt_token_ids: list[int] | None,
    ) -> None:
        """Start empty; `prompt_token_ids` are echoed when given."""
        self.stream = stream
        self.rid = rid
        self._weight_version = weight_version
        self._prompt_token_ids = prompt_token_ids
        self._started_at = time.perf_counter()
        self._text = ""
        self._output_ids: list[int] = []
        self._completion_tokens = 0

    def answer(self, chunk: GenerationChunk, *, incremental: bool = False) -> dict[str, Any]:
        """Take in `chunk` and give the answer up to it, or only what is new."""
        self._completion_tokens += len(chunk.token_ids)
        if incremental:
            self._text, self._output_ids = chunk.text, chunk.token_ids
        else:
            self._text += chunk.text
            self._output_ids += chunk.token_ids
        answer: dict[str, Any] = {
            "text": self._text,
            "output_ids": self._output_ids,
            "meta_info": self._meta_info(chunk),
        }
        if self._prompt_token_ids is not None:
            answer["prompt_token_ids"] = self._prompt_token_ids
        return answer

    def _meta_info(self, chunk: GenerationChunk) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": describe_finish(chunk.finish_reason),
            "prompt_tokens": chunk.prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "cached_tokens": chunk.cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": self._weight_version,
            # The engine counts retractions for the server as a whole, not for each request.
            "total_retractions": chunk.num_retractions,
        }
        if chunk.finish_reason is not None:
            meta["e2e_latency"] = time.perf_counter() - self._started_at
            meta["response_sent_to_client_ts"] = time.time()
        return meta


def describe_finish(reason: FinishReason | None) -> dict[str, Any] | None:
    """The wire's `finish_reason`: `null` while the request runs."""
    if reason is None:
        return None
    described: dict[str, Any] = msgspec.to_builtins(reason)
    return described


async def _tokenize(context: ServerContext, plan: GeneratePlan) -> list[list[int]]:
    prompt_ids = []
    for prompt in plan.prompts:
        if isinstance(prompt, str):
            check_text_size(prompt, context.client.limits)
            prompt_ids.append(await context.tokenizer.encode_async(prompt))
        else:
            prompt_ids.append(prompt)
    return prompt_ids


def _open(context: ServerContext, plan: GeneratePlan, prompt_ids: list[list[int]]) -> list[Output]:
    client = context.client
    generate = client.generate if plan.is_recorded else client.generate_unrecorded
    outputs: list[Output] = []
    try:
        for sample in plan.samples:
            input_ids = prompt_ids[sample.prompt_index]
            stream = generate(
                GenerationInput(
                    rid=sample.rid,
                    input_ids=input_ids,
                    sampling=sample.sampling,
                    stream=plan.stream,
                    explicit_max_new_tokens=sample.explicit_max_new_tokens,
                    cache_namespace=sample.cache_namespace,
                    priority=plan.priority,
                )
            )
            echoed = input_ids if plan.return_prompt_token_ids else None
            outputs.append(Output(stream, sample.rid, context.weight_version, echoed))
    except Exception:
        # One bad prompt refuses the whole request: what was admitted before it must not run.
        close_all([output.stream for output in outputs])
        raise
    return outputs


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _read_all(outputs: list[Output]) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = [{}] * len(outputs)
    async for index, chunk in merge([output.stream for output in outputs]):
        answers[index] = outputs[index].answer(chunk)
    return answers


async def _events(
    outputs: list[Output], plan: GeneratePlan, incremental: bool
) -> AsyncGenerator[bytes, None]:
    async for index, chunk in merge([output.stream for output in outputs]):
        answer = outputs[index].answer(chunk, incremental=incremental)
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
