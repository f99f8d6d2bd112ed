"""One choice of a chat answer: turns the engine's chunks into OpenAI's deltas."""

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
    """A choice of an answer, up to the chunk that was read last.

    Attributes:
        index: the choice's number in the answer.
        parser: splits the text into thoughts, content and calls.
        count: counts the tokens for `usage`.
        reason: how the choice ended; `None` while it grows.
        logprobs: collects the log-probabilities, if they are requested.
        hidden: collects the hidden states, if they are requested.
        calls: rewrites calls, if the request defined tools in another form than functions.
    """

    index: int
    parser: OutputParser
    count: TokenCount
    reason: FinishReason | None = None
    logprobs: AnswerLogprobs | None = None
    hidden: HiddenAnswer | None = None
    calls: CallWriter | None = None

    def feed(self, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """Return the deltas of one chunk in OpenAI's format; each has one kind of content."""
        deltas = [delta for each in self.read(chunk) for delta in _deltas(each)]
        if self.calls is None:
            return deltas
        return self.calls.rewritten(deltas, over=chunk.finish_reason is not None)

    def read(self, chunk: GenerationChunk) -> list[OutputEvent]:
        """Return the events (thoughts, content, calls) that one chunk adds to the answer."""
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
        """Return the keys `finish_reason` and `matched_stop` of a choice that has ended.

        Raises:
            Aborted: the request was aborted.
        """
        reason = ended(self.reason)
        if reason.type == "stop" and self.parser.num_calls:
            word = "function_call" if self.calls and self.calls.forms.is_old else "tool_calls"
            return {"finish_reason": word, "matched_stop": None}
        return {"finish_reason": reason.type, "matched_stop": reason.matched}


def _deltas(output: OutputEvent) -> list[dict[str, Any]]:
    if isinstance(output, EndCall):
        # OpenAI's stream has no event for the end of a call.
        return []
    if isinstance(output, BeginCall):
        # The first delta of a call has the function's name, later ones have arguments. Only the
        # first has `type`, because the official client keeps the last value, even null.
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
    """Return reasoning under both keys that clients read: `reasoning_content` and `reasoning`."""
    told: dict[str, Any] = {"reasoning_content": reasoning}
    return told if reasoning is None else {**told, "reasoning": reasoning}
