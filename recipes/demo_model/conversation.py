"""The shapes of training text: a question with its answers, a chat, a piece of plain text."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One question and everything needed to answer it in any style."""

    text: str
    answer: str
    """A full sentence."""
    short: str
    """The answer alone, for "answer in one word" and for few-shot text."""
    data: dict[str, Any] = field(default_factory=dict)
    """The answer as JSON fields; empty if JSON makes no sense."""
    thought: str = ""
    """One or two sentences of reasoning; empty if there are none."""
    exact: bool = False
    """Whether the text contains something to copy, so that its case and punctuation must stay."""


@dataclass(frozen=True)
class Chat:
    """A conversation up to the last user (or tool) message, and the answer to train on."""

    messages: list[Message]
    answer: str
    tools: list[Tool] = field(default_factory=list)
    thought: str | None = None
    """If given, the chat is rendered with thinking on, and this is put inside the think block."""
    forced: str = ""
    """A beginning of the answer that the caller supplies; it is not trained on."""
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    """If given, the answer in pieces, each with whether it is trained on; forced text is not."""


@dataclass(frozen=True)
class PlainText:
    """Text without a template, all of which is trained on.

    The first `prompt_len` characters are an exception: the model should not learn to write them.
    """

    text: str
    prompt_len: int = 0


Sample = Chat | PlainText
