"""`/api/chat` and `/api/generate`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec

from ollama_api.chat_of_ollama import chat_of_messages, chat_of_prompt
from ollama_api.ollama_lines import LineWriter, encoded
from ollama_api.ollama_request import OllamaChatRequest, OllamaGenerateRequest
from openai_api.call import Call, Reply, Streamed, Whole
from openai_api.chat_prompt import ChatPrompt, encode_raw
from openai_api.chat_run import ChatRun, open_chat
from openai_api.content_parts import inline_image
from openai_api.openai_context import OpenAIContext
from openai_api.output_parser import OutputEvent
from openai_api.request_body import read_body
from openai_api.sampling import WireNames
from runtime.eventloop.heavy_work import aside
from runtime.media.image_loader import NamedItem
from runtime.service.generation import Chunk, Indexed

_CHAT = msgspec.json.Decoder(OllamaChatRequest)
_GENERATE = msgspec.json.Decoder(OllamaGenerateRequest)
_LINES = "application/x-ndjson"


async def chat(call: Call, context: OpenAIContext) -> Reply:
    """Answer `POST /api/chat`."""
    request = await read_body(call, _CHAT)
    writer = LineWriter(request.model, "chat")
    if not request.messages:
        return Whole(writer.nothing())
    body = await aside(request, chat_of_messages, request, sees=context.sees)
    with _own_names():
        run = await open_chat(body, context, "ollama")
    return await _reply(run, writer, is_stream=body.stream)


async def generate(call: Call, context: OpenAIContext) -> Reply:
    """Answer `POST /api/generate`."""
    request = await read_body(call, _GENERATE)
    writer = LineWriter(request.model, "generate")
    if not request.prompt:
        return Whole(writer.nothing())
    body = chat_of_prompt(request, sees=context.sees)
    prompt = await _raw(request, context) if request.raw else None
    with _own_names():
        run = await open_chat(body, context, "ollama", prompt)
    return await _reply(run, writer, is_stream=body.stream)


def _own_names() -> WireNames:
    """Return a context manager that replaces chat's field names in errors by Ollama's."""
    names = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
    return WireNames("num_predict", "top_logprobs", names)


async def _raw(request: OllamaGenerateRequest, context: OpenAIContext) -> ChatPrompt:
    items = [NamedItem(inline_image(each), "images") for each in request.images or ()]
    return await encode_raw(request.prompt, items, context)


async def _reply(run: ChatRun, writer: LineWriter, *, is_stream: bool | None) -> Reply:
    if is_stream:
        lines = _lines(run, writer, await run.generation.begun())
        return Streamed(lines, run.generation.close, end=b"", media_type=_LINES)
    choice = run.choices[0]
    outputs: list[OutputEvent] = []
    async with contextlib.aclosing(run.generation.chunks()) as chunks:
        async for _, chunk in chunks:
            writer.note_chunk()
            outputs += choice.read(chunk)
    return Whole(writer.whole(outputs, choice))


async def _lines(
    run: ChatRun, writer: LineWriter, chunks: AsyncGenerator[Indexed, None]
) -> AsyncGenerator[Chunk, None]:
    choice = run.choices[0]
    async with contextlib.aclosing(chunks):
        async for _, chunk in chunks:
            writer.note_chunk()
            lines = writer.lines(choice.read(chunk))
            if lines:
                yield b"".join(map(encoded, lines))
    yield encoded(writer.last(choice))
