"""The parsers that the server was started with, and the one that a request's output needs."""

from __future__ import annotations

from dataclasses import dataclass

from openai_api.output_parser import OutputParser
from openai_api.reasoning_parsers.reasoning_parser import ReasoningParser
from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from openai_api.tool_parsers.json_array import JsonArrayParser
from openai_api.tool_parsers.registry import TOOL_PARSERS
from openai_api.tool_parsers.tool_parser import ToolParser
from runtime.errors import InvalidRequest, StartupError
from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ParserSet:
    """The chosen classes and what the tokenizer says about their markers.

    Attributes:
        close_id: the token that ends reasoning, where it is one token.
        hidden_markers: a reasoning marker is a special token, so hiding those would hide it too.
    """

    reasoning: type[ReasoningParser] | None = None
    tools: type[ToolParser] | None = None
    close_id: int | None = None
    hidden_markers: bool = False

    @classmethod
    def choose(
        cls, reasoning: str | None, tools: str | None, tokenizer: Tokenizer | None
    ) -> ParserSet:
        """Look both names up.

        Raises:
            StartupError: an unknown name; the message lists the known ones.
        """
        try:
            reasoning_class = REASONING_PARSERS.load(reasoning) if reasoning else None
            tool_class = TOOL_PARSERS.load(tools) if tools else None
        except InvalidRequest as error:
            raise StartupError(error.message) from None
        if reasoning_class is None or tokenizer is None:
            return cls(reasoning_class, tool_class)
        marker_ids = [
            tokenizer.encode(marker, add_special_tokens=False) for marker in reasoning_class.markers
        ]
        close = tokenizer.encode(reasoning_class.close_tag, add_special_tokens=False)
        return cls(
            reasoning_class,
            tool_class,
            close[0] if len(close) == 1 else None,
            any(len(ids) == 1 and ids[0] in tokenizer.special_ids for ids in marker_ids),
        )

    def make(
        self,
        *,
        prompt_is_open: bool,
        separate_reasoning: bool,
        stream_reasoning: bool,
        tool_names: list[str],
        max_calls: int | None,
        forces_call: bool = False,
    ) -> OutputParser:
        """A fresh machine for one choice; a forced call needs no parser of the model's family."""
        reasoning = None
        if self.reasoning is not None and separate_reasoning:
            reasoning = self.reasoning(prompt_is_open=prompt_is_open)
        tools: ToolParser | None = None
        if forces_call:
            tools = JsonArrayParser(tool_names, max_calls=max_calls)
        elif self.tools is not None and tool_names:
            tools = self.tools(tool_names, max_calls=max_calls)
        return OutputParser(reasoning, tools, stream_reasoning=stream_reasoning)
