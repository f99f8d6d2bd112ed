"""Writes the blocks of an answer; streamed and whole answers share one state machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from anthropic_api.message_answers import AnswerBlock, BlockEvent
from openai_api.call_arguments import ObjectText, arguments_object
from openai_api.call_ids import PREFIX
from openai_api.output_parser import (
    BeginCall,
    ContentText,
    EndCall,
    MoreArguments,
    OutputEvent,
)
from openai_api.responses.opaque_text import wrapped
from runtime.requests.random_hex import random_hex

# The form of an id that Anthropic's clients accept.
_PLAIN_ID = re.compile(r"[a-zA-Z0-9_-]{1,57}")


class BlockWriter:
    """Converts the output parser's events to blocks that begin, grow and end."""

    def __init__(self, *, hides_thoughts: bool = False) -> None:
        """Start without a block; hidden thoughts are sent only in the signatures of blocks."""
        self._hides_thoughts = hides_thoughts
        self._hidden: list[str] = []
        self._input = ObjectText()
        self._index = -1
        self._open: Literal["text", "thinking"] | None = None

    def feed(self, outputs: Iterable[OutputEvent]) -> Iterator[BlockEvent]:
        """Return the events for more output."""
        for output in outputs:
            if isinstance(output, BeginCall):
                yield from self._begin_call(output)
            elif isinstance(output, MoreArguments):
                yield from self._add_json(self._input.feed(output.text))
            elif isinstance(output, EndCall):
                yield from self._add_json(self._input.finish())
                yield self._stop()
            elif isinstance(output, ContentText):
                if self._open != "text":
                    yield from self._begin("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": output.text})
            else:
                if self._open != "thinking":
                    empty: AnswerBlock = {"type": "thinking", "thinking": "", "signature": ""}
                    yield from self._begin("thinking", empty)
                if self._hides_thoughts:
                    self._hidden.append(output.text)
                else:
                    yield self._delta({"type": "thinking_delta", "thinking": output.text})

    def finish(self) -> Iterator[BlockEvent]:
        """Return the events that end the last block."""
        if self._open == "thinking":
            # Clients treat the block as signed after this event.
            hidden, self._hidden = "".join(self._hidden), []
            signature = wrapped("thought", hidden) if hidden else ""
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._open is not None:
            yield self._stop()
        self._open = None

    def _add_json(self, text: str) -> Iterator[BlockEvent]:
        if text:
            yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _begin_call(self, call: BeginCall) -> Iterator[BlockEvent]:
        # The model's own id is used if its form is valid here: the next turn's template shows it
        # again.
        own = call.id if call.id and _PLAIN_ID.fullmatch(call.id) else random_hex(12)
        block: AnswerBlock = {
            "type": "tool_use",
            "id": f"{PREFIX}{own}",
            "name": call.name,
            "input": {},
        }
        self._input = ObjectText()
        yield from self._begin(None, block)

    def _begin(
        self, kind: Literal["text", "thinking"] | None, block: AnswerBlock
    ) -> Iterator[BlockEvent]:
        yield from self.finish()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, str]) -> BlockEvent:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> BlockEvent:
        return {"type": "content_block_stop", "index": self._index}


def whole_blocks(outputs: Iterable[OutputEvent], writer: BlockWriter) -> list[AnswerBlock]:
    """Return the blocks of a complete answer, converted by `writer`."""
    blocks: list[AnswerBlock] = []
    parts: list[list[str]] = []
    for event in (*writer.feed(outputs), *writer.finish()):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            parts.append([])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if "signature" in delta:
                blocks[-1]["signature"] = delta["signature"]
            parts[-1].append(delta.get("text") or delta.get("thinking") or _json_of(delta))
    for block, pieces in zip(blocks, parts, strict=True):
        text = "".join(pieces)
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "thinking":
            block["thinking"] = text
        else:
            block["input"] = arguments_object(text)
    return blocks


def _json_of(delta: dict[str, str]) -> str:
    return delta.get("partial_json", "")
