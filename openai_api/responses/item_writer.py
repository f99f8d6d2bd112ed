"""Turns a model's output into the items of a response, and the events that describe them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from openai_api.custom_tools import text_of
from openai_api.output_parser import (
    BeginCall,
    ContentText,
    EndCall,
    MoreArguments,
    OutputEvent,
)
from openai_api.responses import local_shell
from openai_api.responses.item_references import id_of_item
from openai_api.responses.offered_tools import OfferedTools, Origin
from openai_api.responses.opaque_text import wrapped
from runtime.requests.random_hex import random_hex

Event = dict[str, Any]
Status = Literal["completed", "incomplete"]


class ItemWriter:
    """Converts the output parser's events to events about items, which begin, grow and end.

    Attributes:
        output: the items so far; the last one may still grow.
    """

    def __init__(self, response_id: str, tools: OfferedTools, *, keeps_thoughts: bool) -> None:
        """Begin with no item.

        Args:
            response_id: id of the response; it is part of the ids of the items.
            tools: the request's tools; calls are reported with the names that they have there.
            keeps_thoughts: whether reasoning items have encrypted content, which the client can
                send back.
        """
        self.output: list[dict[str, Any]] = []
        self._response_id = response_id
        self._tools = tools
        self._keeps_thoughts = keeps_thoughts
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._open: Literal["message", "reasoning", "call"] | None = None
        # The tool of the current call, if it is the client's shell.
        self._shell: Origin | None = None
        self._call_id = ""

    def feed(self, outputs: Iterable[OutputEvent], logprobs: list[Any]) -> Iterator[Event]:
        """Yield the events for more output; `logprobs` are reported with its first text."""
        for output in outputs:
            if isinstance(output, BeginCall):
                yield from self.finish("completed")
                yield from self._begin_call(output)
            elif isinstance(output, MoreArguments):
                yield from self._add_arguments(output.text)
            elif isinstance(output, EndCall):
                yield from self._end_call(is_complete=output.is_complete)
            elif isinstance(output, ContentText):
                yield from self._begin("message")
                self._texts.append(output.text)
                self._logprobs += logprobs
                delta = {"delta": output.text, "logprobs": logprobs}
                yield self._part("response.output_text.delta", **delta)
                logprobs = []
            else:
                yield from self._begin("reasoning")
                self._texts.append(output.text)
                yield self._part("response.reasoning_text.delta", delta=output.text)

    def add(self, item: dict[str, Any]) -> Iterator[Event]:
        """Yield the events for a complete item that does not come from the model's output."""
        self.output.append(item)
        yield self._of_item("response.output_item.added")
        yield self._of_item("response.output_item.done")

    def add_logprobs(self, logprobs: list[Any]) -> None:
        """Add logprobs of tokens that gave no new text to the current message."""
        if self._open == "message":
            self._logprobs += logprobs

    def finish(self, status: Status) -> Iterator[Event]:
        """Yield the events that end the last item; a call that is still open is incomplete."""
        if self._open is None:
            return
        if self._open == "call":
            yield from self._end_call(is_complete=False)
            return
        item, text = self.output[-1], "".join(self._texts)
        if self._open == "message":
            part = _text_part(text, self._logprobs)
            yield self._part("response.output_text.done", text=text, logprobs=self._logprobs)
        else:
            part = {"type": "reasoning_text", "text": text}
            if self._keeps_thoughts:
                item["encrypted_content"] = wrapped("thought", text)
            yield self._part("response.reasoning_text.done", text=text)
        yield self._part("response.content_part.done", part=part)
        item["content"] = [part]
        item["status"] = status
        self._open = None
        yield self._of_item("response.output_item.done")

    def _begin(self, kind: Literal["message", "reasoning"]) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self.finish("completed")
        self._open, self._texts, self._logprobs = kind, [], []
        if kind == "message":
            item: dict[str, Any] = {
                "id": self._new_id("msg"),
                "type": "message",
                "role": "assistant",
            }
            part = _text_part("", [])
        else:
            item = {"id": self._new_id("rs"), "type": "reasoning", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self.output.append({**item, "content": [], "status": "in_progress"})
        yield self._of_item("response.output_item.added")
        yield self._part("response.content_part.added", part=part)

    def _begin_call(self, call: BeginCall) -> Iterator[Event]:
        origin = self._tools.origins.get(call.name) or Origin(call.name)
        # A call keeps the id that the model wrote, if any, because the next turn shows it again.
        self._call_id = call.id or f"call_{random_hex(12)}"
        self._open, self._texts = "call", []
        self._shell = origin if origin.is_command else None
        if self._shell is None:
            yield self._begin_item(origin)

    def _begin_item(self, origin: Origin) -> Event:
        item = {"call_id": self._call_id, "name": origin.name}
        if origin.namespace is not None:
            item["namespace"] = origin.namespace
        if origin.is_custom:
            item = {"id": self._new_id("ctc"), "type": "custom_tool_call", **item, "input": ""}
        else:
            item = {"id": self._new_id("fc"), "type": "function_call", **item, "arguments": ""}
        self.output.append({**item, "status": "in_progress"})
        return self._of_item("response.output_item.added")

    def _add_arguments(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        if self._shell is None and self.output[-1]["type"] == "function_call":
            yield self._named("response.function_call_arguments.delta", delta=text)

    def _end_call(self, *, is_complete: bool) -> Iterator[Event]:
        told, self._open = "".join(self._texts), None
        if self._shell is not None:
            # A shell command is sent when it is complete. Other text is sent as a function call.
            action = local_shell.action_of(told) if is_complete else None
            if action is not None:
                yield from self._shell_call(action)
                return
            yield self._begin_item(self._shell)
            yield self._named("response.function_call_arguments.delta", delta=told)
        item = self.output[-1]
        if item["type"] == "function_call":
            key, word = "arguments", "function_call_arguments"
        else:
            # The client of a custom tool expects the plain text, not the JSON object around it.
            key, word, told = "input", "custom_tool_call_input", text_of(told)
            yield self._named(f"response.{word}.delta", delta=told)
        yield self._named(f"response.{word}.done", **{key: told, "name": item["name"]})
        item |= {key: told, "status": "completed" if is_complete else "incomplete"}
        yield self._of_item("response.output_item.done")

    def _shell_call(self, action: dict[str, Any]) -> Iterator[Event]:
        item = {
            "id": self._new_id("lsh"),
            "type": "local_shell_call",
            "call_id": self._call_id,
            "action": action,
        }
        self.output.append({**item, "status": "in_progress"})
        yield self._of_item("response.output_item.added")
        self.output[-1]["status"] = "completed"
        yield self._of_item("response.output_item.done")

    def _new_id(self, prefix: str) -> str:
        return id_of_item(prefix, self._response_id, len(self.output))

    def _of_item(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.output) - 1, "item": dict(self.output[-1])}

    def _named(self, kind: str, **fields: Any) -> Event:
        index = len(self.output) - 1
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": index, **fields}

    def _part(self, kind: str, **fields: Any) -> Event:
        return self._named(kind, content_index=0, **fields)


def _text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
