"""Builds answers in Ollama's format: the JSON lines of a stream, or one JSON object."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from ollama_api.ollama_answers import Counts, DoneReason
from openai_api.aborted import ended
from openai_api.call_arguments import arguments_object
from openai_api.chat_choice import ChatChoice
from openai_api.output_parser import Call, ContentText, OutputEvent, ReasoningText, WholeCalls
from runtime.service.error_table import describe_error

MAX_MESSAGE_CHARS = 2000


class LineWriter:
    """Converts the output parser's events to lines of `/api/chat` or `/api/generate`."""

    def __init__(self, model: str, route: Literal["chat", "generate"]) -> None:
        """Begin an answer; its durations are measured from this call."""
        self._model = model
        self._route = route
        self._calls = WholeCalls()
        self._began = time.perf_counter_ns()
        self._first: int | None = None

    def note_chunk(self) -> None:
        """Note that tokens have arrived; the first call ends the prompt's measured duration."""
        if self._first is None:
            self._first = time.perf_counter_ns()

    def lines(self, outputs: Iterable[OutputEvent]) -> list[dict[str, Any]]:
        """Return a line for each piece of output."""
        return [self._line(_said([output])) for output in self._calls.feed(outputs)]

    def whole(self, outputs: Iterable[OutputEvent], choice: ChatChoice) -> dict[str, Any]:
        """Return the answer in one piece."""
        said = _said(self._calls.feed(outputs))
        return {**self._line(said), "done": True, **self._counts(choice)}

    def last(self, choice: ChatChoice) -> dict[str, Any]:
        """Return the line that ends a stream."""
        return {**self._line({"content": ""}), "done": True, **self._counts(choice)}

    def nothing(self) -> dict[str, Any]:
        """Return the answer to an empty prompt, which only reports that the model is loaded."""
        return {**self._line({"content": ""}), "done": True, "done_reason": "load"}

    def _line(self, said: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line: dict[str, Any] = {"model": self._model, "created_at": now}
        if self._route == "chat":
            line["message"] = {"role": "assistant", **said}
        else:
            line["response"] = said.pop("content")
            line |= said
        return {**line, "done": False}

    def _counts(self, choice: ChatChoice) -> Counts:
        reason = ended(choice.reason)
        word: DoneReason = "length" if reason.type == "length" else "stop"
        now = time.perf_counter_ns()
        first = now if self._first is None else self._first
        return {
            "done_reason": word,
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": choice.count.prompt,
            "prompt_eval_duration": first - self._began,
            "eval_count": choice.count.completion,
            "eval_duration": now - first,
        }


def _said(outputs: Iterable[ReasoningText | ContentText | Call]) -> dict[str, Any]:
    content, thinking, calls = [], [], []
    for output in outputs:
        if isinstance(output, Call):
            arguments = arguments_object(output.arguments)
            calls.append({"function": {"name": output.name, "arguments": arguments}})
        elif isinstance(output, ContentText):
            content.append(output.text)
        else:
            thinking.append(output.text)
    said: dict[str, Any] = {"content": "".join(content)}
    if thinking:
        said["thinking"] = "".join(thinking)
    if calls:
        said["tool_calls"] = calls
    return said


def encoded(line: dict[str, Any]) -> bytes:
    """Encode one line of a stream."""
    return orjson.dumps(line) + b"\n"


def error_line(error: Exception) -> bytes:
    """Return the error as the last line of a stream that has already begun with status 200."""
    return encoded({"error": describe_error(error).message[:MAX_MESSAGE_CHARS]})
