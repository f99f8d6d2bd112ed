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
    """The bare answer, for "answer in one word" and for few-shot text."""
    data: dict[str, Any] = field(default_factory=dict)
    """The answer as JSON fields; empty if JSON makes no sense."""
    thought: str = ""
    """One or two sentences of reasoning; empty where none was written."""
    exact: bool = False
    """Whether the text contains something to copy, so that its case and punctuation must stay."""


@dataclass(frozen=True)
class Chat:
    """A conversation up to the last user (or tool) message, and the answer to train on."""

    messages: list[Message]
    answer: str
    tools: list[Tool] = field(default_factory=list)
    thought: str | None = None
    """When given, the chat is rendered with thinking on and this goes inside the think block."""
    forced: str = ""
    """A beginning of the answer that the caller supplies; it gets no loss."""
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    """When given, the answer in pieces, each with whether it gets loss (grammar-forced text)."""


@dataclass(frozen=True)
class PlainText:
    """Text without a template; loss on all of it.

    The first `prompt_len` characters get none: a prefix that the model should not learn to write.
    """

    text: str
    prompt_len: int = 0


Sample = Chat | PlainText
