"""`headrace batch in.jsonl out.jsonl` runs a file of requests on an offline engine, resumably.

A line holds `text` (or `prompt`), `input_ids` or `messages`, and may hold `image_data`,
`sampling_params` and an `id`. A line in OpenAI's batch format gets its answer in that format. Each
answer is written as soon as it is complete, with the number of its line. If the command is stopped
and run again, it continues with the lines that have no answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec
import orjson

from headrace.batch_files import BatchFileError, BatchLine, BatchOutput, has_failed, read_lines
from headrace.batch_images import inline_body, inline_messages, urls_of
from headrace.engine.engine import Engine
from headrace.engine.engine_errors import EngineError, translated
from headrace.engine.progress_bar import Progress
from headrace.engine.server_args import ServerArgs
from headrace.engine.workers import run_workers
from openai_api.batches.batch_lines import BadLine, check_line, refused
from openai_api.chat_prompt import build_chat_prompt
from openai_api.chat_tools import settle_tools
from openai_api.endpoints.batch_answer import answer as batch_answer
from openai_api.openai_context import OpenAIContext, make_context
from openai_api.schemas.chat import ChatCompletionRequest, check_chat_request
from runtime.errors import InvalidRequest
from runtime.eventloop.absent_nulls import convert
from runtime.launch.command_line import parse_args

_IN_FLIGHT_PER_ROW = 2
_KEYS = frozenset(
    {"id", "custom_id", "text", "prompt", "input_ids", "messages", "sampling_params"}
    | {"chat_template_kwargs", "rid", "priority", "cache_salt", "extra_key", "image_data"}
)


def main(input_path: str, output_path: str, engine_arguments: Sequence[str], out: TextIO) -> int:
    """Run `headrace batch`.

    Args:
        input_path: path of the file with the requests, one JSON object per line.
        output_path: path of the file for the answers; the answers of an existing file are kept.
        engine_arguments: options of the engine, as on the server's command line.
        out: receives the messages for the user.

    Returns:
        The exit status: 0 if every request has an answer, 1 if some failed, 130 after Ctrl-C.
    """
    source = Path(input_path)
    if not source.is_file():
        out.write(f"headrace: {source} is not a file.\n")
        return 1
    parsed = parse_args(["--log-level", "error", *engine_arguments], prog="headrace batch")
    for notice in parsed.notices:
        out.write(f"{notice}\n")
    output: BatchOutput | None = None
    try:
        with BatchOutput(Path(output_path)) as output:
            missing = sum(not output.has(line) for line in read_lines(source))
            if not missing:
                out.write(f"Every request of {source} is answered in {output.path}.\n")
                return 0
            if output.finished:
                out.write(f"{len(output.finished)} already answered, {missing} to go.\n")
            with Engine(server_args=ServerArgs.from_config(parsed.config)) as engine:
                num_failed = asyncio.run(_run(engine, source, output, missing))
    except KeyboardInterrupt:
        out.write("Stopped. Run the same command again to continue.\n")
        return 130
    except (BatchFileError, EngineError, OSError) as error:
        out.write(f"headrace: {error}\n")
        return 1
    if num_failed:
        out.write(f"{num_failed} of {missing} failed; {output.path} gives the reasons.\n")
    return 1 if num_failed else 0


async def _run(engine: Engine, source: Path, output: BatchOutput, missing: int) -> int:
    context = engine.context
    worker = context.status.worker
    rows = worker.max_running_requests if worker is not None else 1
    rows *= len(context.status.replicas)
    todo = (line for line in read_lines(source) if not output.has(line))
    chat = make_context(context)
    num_failed = 0

    async def work() -> None:
        nonlocal num_failed
        # All workers read from the same iterator, so a line is read when a worker is free.
        for line in todo:
            if line.is_openai:
                answer = await _openai_answer(engine, chat, line)
                num_failed += has_failed(answer)
            else:
                try:
                    answer = await _answer(engine, chat, line)
                except (ValueError, TypeError) as error:
                    num_failed += 1
                    answer = {"error": {"message": str(error), "type": type(error).__name__}}
            output.write(line, answer)
            progress.advance(_num_tokens(answer))

    with Progress(missing, sys.stderr.isatty()) as progress:
        await run_workers(work, min(missing, rows * _IN_FLIGHT_PER_ROW))
    return num_failed


async def _openai_answer(engine: Engine, chat: OpenAIContext, line: BatchLine) -> dict[str, Any]:
    try:
        url, body = check_line(line.request)
    except BadLine as error:
        return {"response": None, "error": {"code": "invalid_request", "message": str(error)}}
    try:
        body = await asyncio.to_thread(inline_body, body, sees=chat.sees)
    except InvalidRequest as error:
        return {"response": refused(error), "error": None}
    # The handlers of OpenAI's routes must run on the engine's event loop.
    response = await engine.run(batch_answer(chat, url, orjson.dumps(body)))
    return {"response": response, "error": None}


async def _answer(engine: Engine, chat: OpenAIContext, line: BatchLine) -> dict[str, Any]:
    if line.problem is not None:
        raise ValueError(line.problem)
    request = dict(line.request)
    unknown = sorted(set(request) - _KEYS)
    if unknown:
        raise ValueError(f"Unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}.")
    for name in ("id", "custom_id"):
        request.pop(name, None)
    text = request.pop("text", None)
    prompt = request.pop("prompt", text)
    messages = request.pop("messages", None)
    variables = request.pop("chat_template_kwargs", None)
    if messages is not None:
        if prompt is not None or not {"input_ids", "image_data"}.isdisjoint(request):
            raise ValueError("messages excludes text, prompt, input_ids and image_data.")
        messages = await asyncio.to_thread(inline_messages, messages, sees=chat.sees)
        request["input_ids"] = await _render(chat, messages, variables)
        # The rendered token ids already contain the placeholders of these images.
        request["image_data"] = urls_of(messages)
    answers = await engine.async_generate(prompt, **request)
    if isinstance(answers, list):
        return {"outputs": [_kept(answer) for answer in answers]}
    return _kept(answers)


async def _render(chat: OpenAIContext, messages: Any, variables: Any) -> list[int]:
    body = {"model": "", "messages": messages, "chat_template_kwargs": variables}
    try:
        request = convert(body, ChatCompletionRequest)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("`$.", "`")) from None
    with translated():
        settle_tools(request)
        check_chat_request(request)
        return (await build_chat_prompt(request, chat)).input_ids


def _kept(answer: dict[str, Any]) -> dict[str, Any]:
    return {"text": answer["text"], "meta_info": answer["meta_info"]}


def _num_tokens(answer: dict[str, Any]) -> int:
    if "response" in answer:
        usage = ((answer["response"] or {}).get("body") or {}).get("usage") or {}
        return int(usage.get("completion_tokens") or 0)
    answers = answer.get("outputs", [answer])
    return sum(each.get("meta_info", {}).get("completion_tokens", 0) for each in answers)
