"""The variables of a program: those that are set, and those that queued expressions will set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class VariableStream:
    """The text of a generation while it arrives; every reader starts at its beginning.

    Attributes:
        text: the text so far.
        chunks: for each piece, the offset of its end and its meta information.
        is_done: whether the text is complete.
    """

    __slots__ = ("chunks", "is_done", "text")

    def __init__(self) -> None:
        """Begin without text."""
        self.text = ""
        self.chunks: list[tuple[int, Any]] = []
        self.is_done = False

    def add(self, delta: str, meta: Any) -> None:
        """Append a piece of text with its meta information."""
        self.text += delta
        self.chunks.append((len(self.text), meta))


class Variables:
    """The variables of one program, by name.

    Attributes:
        values: values of the variables that are set.
        metas: the back end's meta information about each variable.
        parsers: functions that convert a variable's text to its typed value.
        streams: the latest stream of each variable.
        abandoned: names that queued expressions should have set when the program failed.
    """

    __slots__ = ("_expected", "abandoned", "metas", "parsers", "streams", "values")

    def __init__(self) -> None:
        """Begin empty."""
        self.values: dict[str, Any] = {}
        self.metas: dict[str, Any] = {}
        self.parsers: dict[str, Callable[[str], Any]] = {}
        self.streams: dict[str, VariableStream] = {}
        self.abandoned: set[str] = set()
        self._expected: dict[str, int] = {}

    def expect(self, name: str) -> None:
        """Note that a queued expression will set `name`."""
        self._expected[name] = self._expected.get(name, 0) + 1

    def is_expected(self, name: str) -> bool:
        """Whether a queued expression will set `name`."""
        return name in self._expected

    def set(
        self,
        name: str,
        value: Any,
        meta: Any = None,
        parse: Callable[[str], Any] | None = None,
    ) -> None:
        """Set a variable that `expect` announced."""
        left = self._expected.get(name, 0) - 1
        if left > 0:
            self._expected[name] = left
        else:
            self._expected.pop(name, None)
        self.values[name] = value
        self.metas.pop(name, None)
        self.parsers.pop(name, None)
        if meta is not None:
            self.metas[name] = meta
        if parse is not None:
            self.parsers[name] = parse

    def begin_stream(self, name: str, stream: VariableStream) -> None:
        """Store the stream whose text will become the value of `name`."""
        self.streams[name] = stream

    def abandon(self) -> None:
        """Note that the program has failed, so that expected variables will never be set."""
        self.abandoned.update(self._expected)
        self._expected.clear()

    def copy(self) -> Variables:
        """Return a copy with its own dictionaries; the values in them are shared."""
        copied = Variables()
        copied.values = dict(self.values)
        copied.metas = dict(self.metas)
        copied.parsers = dict(self.parsers)
        copied.streams = dict(self.streams)
        return copied


class Split(NamedTuple):
    """A piece of output, split into reasoning and content."""

    reasoning: str
    content: str


class Splitter:
    """Separates the reasoning from the answer of a generation, as a whole or in pieces."""

    __slots__ = ("_model_type", "_parser", "_prompt_tail")

    def __init__(self, model_type: str, prompt_tail: str) -> None:
        """Create the reasoning parser.

        Args:
            model_type: name of the parser, such as `qwen3`.
            prompt_tail: the text of the open turn, which may have opened the reasoning already.

        Raises:
            ValueError: no parser has this name; the message lists the known ones.
        """
        # These are the server's parsers. The module does not import torch.
        from openai_api.reasoning_parsers.registry import REASONING_PARSERS

        kind = REASONING_PARSERS.load(model_type)
        self._model_type = model_type
        self._prompt_tail = prompt_tail
        is_open = prompt_tail.rstrip().endswith(kind.markers[0]) if kind.markers else False
        self._parser = kind(prompt_is_open=is_open)

    def fresh(self) -> Splitter:
        """Return a new splitter with the same settings."""
        return Splitter(self._model_type, self._prompt_tail)

    def feed(self, text: str) -> Split:
        """Add a piece of output, and return the new reasoning and the new answer text in it."""
        return _joined(self._parser.feed(text))

    def finish(self) -> Split:
        """End the output, and return the text that was held back."""
        return _joined(self._parser.finish())

    def whole(self, text: str) -> Split:
        """Split a whole output into reasoning and answer."""
        return _joined([self.feed(text), self.finish()])


def _joined(parts: Iterable[tuple[str, str]]) -> Split:
    reasoning, content = zip(("", ""), *parts, strict=True)
    return Split("".join(reasoning), "".join(content))
