"""What a reasoning parser is: one state machine, fed with pieces, for streams and whole texts."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from openai_api.parser_signs import Signs
from runtime.requests.sampling_params import ThoughtTexts


class SplitText(NamedTuple):
    """More of the reasoning, and more of the answer behind it."""

    reasoning: str
    content: str


class ReasoningParser(Protocol):
    """Splits a model's output into its reasoning and its answer.

    Attributes:
        open_tag: the text that begins reasoning.
        close_tag: the text that ends reasoning.
        lead: the text that an answer without reasoning begins with; empty where nothing must
            stand there.
        ends_before: texts of what follows that end reasoning whose own close tag is left out.
        call_opens: texts that begin calls, and end reasoning in that way where calls may come.
        forced_end: the text that ends reasoning whose budget is used up.
        bridge: the text between that and an answer; empty where nothing must stand there.
        reopen_tag: the text that begins reasoning again after `close_tag`; empty: nothing does.
        markers: texts that must stay visible in the output for the parser to work.
        splits: thoughts are told apart from the answer.
        signs: what shows that a model reasons so.
        has_reasoned: whether reasoning has begun.
        is_reasoning: whether the output fed so far ends inside reasoning.
    """

    open_tag: str
    close_tag: str
    lead: str
    ends_before: tuple[str, ...]
    call_opens: tuple[str, ...]
    forced_end: str
    bridge: str
    reopen_tag: str
    markers: tuple[str, ...]
    splits: bool
    signs: Signs
    has_reasoned: bool
    is_reasoning: bool

    def __init__(self, *, prompt_is_open: bool, may_call: bool = True) -> None:
        """Say whether the prompt itself ends inside reasoning, and whether calls may come."""

    def feed(self, text: str) -> list[SplitText]:
        """Take more output: what it adds, in its order."""

    def finish(self) -> list[SplitText]:
        """The output is over: what was held back."""


def implied_ends(kind: type[ReasoningParser], *, may_call: bool) -> tuple[str, ...]:
    """Texts that end reasoning without its close tag, for texts and for tokens alike.

    Args:
        kind: how the model reasons.
        may_call: whether it may call tools in a form of its own; where it may not, what looks like
            a call is a thought.
    """
    return (*kind.ends_before, *(kind.call_opens if may_call else ()))


def thought_texts(
    kind: type[ReasoningParser], *, prompt_is_open: bool, may_call: bool
) -> ThoughtTexts:
    """What `kind` looks for, for those who need its places in the text.

    Args:
        kind: how the model reasons.
        prompt_is_open: whether the prompt itself ends inside reasoning.
        may_call: whether it may call tools in a form of its own.
    """
    if kind.reopen_tag:
        # Messages, each with a header that says what it is.
        return ThoughtTexts(
            headers=list(kind.ends_before),
            body=kind.open_tag.removeprefix(kind.reopen_tag),
            thought=kind.reopen_tag,
        )
    return ThoughtTexts(
        is_open=kind(prompt_is_open=prompt_is_open, may_call=may_call).is_reasoning,
        open=kind.open_tag,
        ends=[kind.close_tag],
        implied=list(implied_ends(kind, may_call=may_call)),
    )
