"""One choice of a chat answer: converts chunks of the engine to deltas of the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openai_api.aborted import ended
from openai_api.answer_logprobs import AnswerLogprobs
from openai_api.chat_tools import CallWriter
from openai_api.output_parser import (
    BeginCall,
    ContentText,
    EndCall,
    MoreArguments,
    OutputEvent,
    OutputParser,
)
from openai_api.usage import TokenCount
from runtime.client.generation_stream import GenerationChunk
from runtime.extras.hidden_states.answer import HiddenAnswer
from runtime.ipc.messages import FinishReason
from runtime.requests.random_hex import random_hex


@dataclass
class ChatChoice:
    """A choice while it grows, and how it ended.

    Attributes:
        logprobs: set when they are requested.
        hidden: set when hidden states are requested.
        calls: set when calls are reported in another form than that of functions.
    """

    index: int
    parser: OutputParser
    count: TokenCount
    reason: FinishReason | None = None
    logprobs: AnswerLogprobs | None = None
    hidden: HiddenAnswer | None = None
    calls: CallWriter | None = None

    def feed(self, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """Return the deltas of one chunk in OpenAI's form; each has one kind of content."""
        deltas = [delta for each in self.read(chunk) for delta in _deltas(each)]
        if self.calls is None:
            return deltas
        return self.calls.rewritten(deltas, over=chunk.finish_reason is not None)

    def read(self, chunk: GenerationChunk) -> list[OutputEvent]:
        """Return the parts that one chunk adds to the answer."""
        self.count.add(chunk)
        if self.hidden is not None:
            self.hidden.add(chunk)
        events = self.parser.feed(chunk.text)
        if chunk.finish_reason is not None:
            self.reason = chunk.finish_reason
            events += self.parser.finish()
        self.count.has_reasoned = self.parser.has_reasoned
        if self.logprobs is not None:
            self.logprobs.add(chunk, events)
        return events

    def take_logprobs(self) -> dict[str, Any] | None:
        """Return the log-probabilities since the last call; `None` if not requested."""
        return None if self.logprobs is None else self.logprobs.take()

    def end(self) -> dict[str, Any]:
        """Return `finish_reason` and `matched_stop`.

        Raises:
            Aborted: the answer is not complete.
        """
        reason = ended(self.reason)
        if reason.type == "stop" and self.parser.num_calls:
            word = "function_call" if self.calls and self.calls.forms.is_old else "tool_calls"
            return {"finish_reason": word, "matched_stop": None}
        return {"finish_reason": reason.type, "matched_stop": reason.matched}


def _deltas(output: OutputEvent) -> list[dict[str, Any]]:
    if isinstance(output, EndCall):
        # This wire has no event for the end of a call.
        return []
    if isinstance(output, BeginCall):
        # The function's name comes first, then its arguments. A later delta omits `type`, because
        # the official client keeps the last value, even null.
        header = {
            "index": output.index,
            "id": output.id or f"call_{random_hex(12)}",
            "type": "function",
            "function": {"name": output.name, "arguments": ""},
        }
        return [{"content": None, "reasoning_content": None, "tool_calls": [header]}]
    if isinstance(output, MoreArguments):
        part = {"index": output.index, "function": {"arguments": output.text}}
        return [{"content": None, "reasoning_content": None, "tool_calls": [part]}]
    if isinstance(output, ContentText):
        return [{"content": output.text, "reasoning_content": None}]
    return [{"content": None, **spelled(output.text)}]


def spelled(reasoning: str | None) -> dict[str, Any]:
    """Return reasoning under both names: some clients read one, some the other."""
    told: dict[str, Any] = {"reasoning_content": reasoning}
    return told if reasoning is None else {**told, "reasoning": reasoning}
