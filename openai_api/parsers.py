"""The parsers that the server was started with, and the parser for a request's output."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from openai_api.call_ids import AnswerIds
from openai_api.output_parser import OutputParser
from openai_api.reasoning_parsers.reasoning_parser import ReasoningParser, implied_ends
from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from openai_api.tool_parsers.json_array import JsonArrayParser
from openai_api.tool_parsers.registry import TOOL_PARSERS
from openai_api.tool_parsers.tool_parser import CallForm, Functions, ToolParser
from runtime.config.registry import Registry
from runtime.errors import InvalidRequest, StartupError
from runtime.text.tokenizer import Tokenizer

T = TypeVar("T")

# The name of parsers made from the checkpoint's own description.
DESCRIBED = "response_template"


@dataclass(frozen=True)
class Described:
    """Parsers made from a checkpoint's `response_template`; `None` if it describes none."""

    reasoning: type[ReasoningParser] | None = None
    tools: type[ToolParser] | None = None


@dataclass(frozen=True)
class ThinkingTokens:
    """The token ids that mark thoughts.

    Attributes:
        open_ids: ids that begin thoughts; empty if other ids could spell the same text.
        lead_ids: ids that begin an answer without thoughts.
        close_id: the id that ends thoughts.
        implied_ids: ids that also end thoughts, and belong to the text that follows.
        call_ids: ids that also end thoughts, but only if calls are allowed.
        forced_ids: ids inserted to end thoughts whose budget is used up.
        bridge_ids: ids between the end of thoughts and an answer.
        reopen_ids: ids that begin thoughts again.
    """

    open_ids: tuple[int, ...]
    lead_ids: tuple[int, ...]
    close_id: int
    implied_ids: tuple[int, ...]
    call_ids: tuple[int, ...]
    forced_ids: tuple[int, ...]
    bridge_ids: tuple[int, ...]
    reopen_ids: tuple[int, ...]

    def where(self, *, may_call: bool) -> ThinkingTokens:
        """Return the ids for a request, depending on whether its answer may have calls."""
        implied = (*self.implied_ids, *(self.call_ids if may_call else ()))
        return dataclasses.replace(self, implied_ids=implied, call_ids=())

    @classmethod
    def of(cls, kind: type[ReasoningParser], tokenizer: Tokenizer) -> ThinkingTokens | None:
        """Return the ids of `kind`; `None` if its close tag is several ids."""

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        def single(texts: Iterable[str]) -> tuple[int, ...]:
            return tuple(each[0] for each in map(ids, texts) if len(each) == 1)

        opening, lead, close = ids(kind.open_tag), ids(kind.lead), ids(kind.close_tag)
        if len(close) != 1:
            return None
        return cls(
            # After a header's mark only these ids spell the tag. An answer may begin with other
            # ids.
            open_ids=opening if lead or len(opening) == 1 else (),
            lead_ids=lead,
            close_id=close[0],
            implied_ids=single(implied_ends(kind, may_call=False)),
            call_ids=single(kind.call_opens),
            forced_ids=ids(kind.forced_end),
            bridge_ids=ids(kind.bridge),
            reopen_ids=ids(kind.reopen_tag),
        )


@dataclass(frozen=True)
class ParserSet:
    """The chosen classes, and how the tokenizer encodes their markers.

    Attributes:
        thinking: the tokens that mark reasoning; `None` if tokens cannot show reasoning.
        hidden_markers: a reasoning marker is a special token, so it is hidden like all special
            tokens.
        call_form: the form of calls for grammars; `None` without a tool parser that has one.
        special_calls: some markers of calls are special tokens.
    """

    reasoning: type[ReasoningParser] | None = None
    tools: type[ToolParser] | None = None
    thinking: ThinkingTokens | None = None
    hidden_markers: bool = False
    call_form: CallForm | None = None
    special_calls: bool = False

    @classmethod
    def choose(
        cls,
        reasoning: str | None,
        tools: str | None,
        tokenizer: Tokenizer | None,
        described: Described | None = None,
    ) -> ParserSet:
        """Look up both names; `DESCRIBED` means the parser in `described`.

        Raises:
            StartupError: an unknown name; the message lists the known ones.
        """
        described = described or Described()
        try:
            reasoning_class = _load(reasoning, REASONING_PARSERS, described.reasoning)
            tool_class = _load(tools, TOOL_PARSERS, described.tools)
        except InvalidRequest as error:
            raise StartupError(error.message) from None
        if tokenizer is None:
            return cls(reasoning_class, tool_class)
        call_form = None if tool_class is None else tool_class.call_form
        special_calls = tool_class is not None and _any_special(tool_class.markers, tokenizer)
        if reasoning_class is None:
            return cls(None, tool_class, call_form=call_form, special_calls=special_calls)
        return cls(
            reasoning_class,
            tool_class,
            ThinkingTokens.of(reasoning_class, tokenizer),
            _any_special(reasoning_class.markers, tokenizer),
            call_form,
            special_calls,
        )

    def splitting(
        self, *, separate_reasoning: bool, forces_call: bool
    ) -> type[ReasoningParser] | None:
        """Make the parser that splits off the thoughts of an answer, if any; see `make`."""
        # A forced call begins where thoughts end, so it always needs the parser.
        return self.reasoning if separate_reasoning or forces_call else None

    def make(
        self,
        *,
        prompt_is_open: bool,
        separate_reasoning: bool,
        stream_reasoning: bool,
        functions: Functions,
        max_calls: int | None,
        forces_call: bool = False,
        may_call: bool = True,
        ids: AnswerIds | None = None,
    ) -> OutputParser:
        """Make a parser for one choice; a forced call needs no parser of the model's family.

        Args:
            prompt_is_open: the prompt ends inside reasoning.
            separate_reasoning: reasoning is separate from the content.
            stream_reasoning: reasoning comes piece by piece.
            functions: the functions that may be called.
            max_calls: the most calls.
            forces_call: the output is a forced call.
            may_call: the model may call in its own form.
            ids: ids of the calls; by default the model's own.
        """
        reasoning = None
        kind = self.splitting(separate_reasoning=separate_reasoning, forces_call=forces_call)
        if kind is not None:
            reasoning = kind(prompt_is_open=prompt_is_open, may_call=may_call)
        tools: ToolParser | None = None
        if forces_call:
            tools = JsonArrayParser(functions, max_calls=max_calls)
        elif self.tools is not None and functions:
            tools = self.tools(functions, max_calls=max_calls)
        return OutputParser(reasoning, tools, stream_reasoning=stream_reasoning, ids=ids)


def _load(name: str | None, registry: Registry[type[T]], made: type[T] | None) -> type[T] | None:
    if name == DESCRIBED and made is not None:
        return made
    return registry.load(name) if name else None


def _any_special(texts: Iterable[str], tokenizer: Tokenizer) -> bool:
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return any(len(each) == 1 and each[0] in tokenizer.special_ids for each in ids)
