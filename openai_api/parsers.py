"""The parsers of reasoning and tool calls: the server's choice, and a parser for each output."""

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

# The name that stands for parsers made from the checkpoint's `response_template`.
DESCRIBED = "response_template"


@dataclass(frozen=True)
class Described:
    """Parsers made from a checkpoint's `response_template`; `None` for a parser that it lacks."""

    reasoning: type[ReasoningParser] | None = None
    tools: type[ToolParser] | None = None


@dataclass(frozen=True)
class ThinkingTokens:
    """The token ids that mark thoughts (reasoning) in a model's output.

    Attributes:
        open_ids: ids that begin thoughts; empty if other ids could spell the same text.
        lead_ids: ids that begin an answer without thoughts.
        close_id: the id that ends thoughts.
        implied_ids: ids that also end thoughts, and belong to the text that follows.
        call_ids: ids that also end thoughts, but only if calls are allowed.
        forced_ids: ids that the engine inserts to end thoughts whose budget is used up.
        bridge_ids: ids that stand between the end of thoughts and an answer.
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
        """Return the ids for a request; `call_ids` join `implied_ids` if calls are allowed."""
        implied = (*self.implied_ids, *(self.call_ids if may_call else ()))
        return dataclasses.replace(self, implied_ids=implied, call_ids=())

    @classmethod
    def of(cls, kind: type[ReasoningParser], tokenizer: Tokenizer) -> ThinkingTokens | None:
        """Return the ids of a reasoning parser's texts; `None` if its close tag is several ids."""

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        def single(texts: Iterable[str]) -> tuple[int, ...]:
            return tuple(each[0] for each in map(ids, texts) if len(each) == 1)

        opening, lead, close = ids(kind.open_tag), ids(kind.lead), ids(kind.close_tag)
        if len(close) != 1:
            return None
        return cls(
            # An open tag of several ids is recognised only if `lead` exists: then an output begins
            # with a header's special token, after which only these ids spell the tag.
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
    """The chosen parser classes, and how the tokenizer encodes the texts that they look for.

    Attributes:
        reasoning: the reasoning parser's class; `None` for no parser.
        tools: the tool-call parser's class; `None` for no parser.
        thinking: the tokens that mark reasoning; `None` if single tokens do not mark it.
        hidden_markers: whether a text that marks reasoning is a special token. Outputs hide such
            tokens by default.
        call_form: the format of calls for grammars; `None` if the tool-call parser has none.
        special_calls: whether a text that marks calls is a special token.
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
        """Load both parser classes by name; `DESCRIBED` means the class in `described`.

        Raises:
            StartupError: a name is unknown; the message lists the known ones.
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
        """Return the reasoning parser's class if thoughts must be split off, else None."""
        # A forced call begins where thoughts end, so the parser is needed to find that point.
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
        """Make the parser for one choice of an answer.

        Args:
            prompt_is_open: whether the prompt ends inside reasoning.
            separate_reasoning: whether reasoning is separated from the content.
            stream_reasoning: whether reasoning is returned as it arrives.
            functions: the functions that may be called.
            max_calls: the most calls of the answer; `None` for any number.
            forces_call: whether the output is a forced call. Forced calls have the same format for
                all models.
            may_call: whether the model may call tools in its family's own format.
            ids: makes the ids of calls; by default calls keep the ids that the model writes.
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
