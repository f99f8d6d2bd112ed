"""A program's variables: set, expected or streaming."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class VariableStream:
    """The text of a generation as it arrives; every reader starts at its beginning.

    Attributes:
        text: the text so far.
        chunks: for each piece, the offset of its end and its meta information.
        is_done: whether the text is complete.
    """

    __slots__ = ("chunks", "is_done", "text")

    def __init__(self) -> None:
        """Begin empty."""
        self.text = ""
        self.chunks: list[tuple[int, Any]] = []
        self.is_done = False

    def add(self, delta: str, meta: Any) -> None:
        """Append a piece."""
        self.text += delta
        self.chunks.append((len(self.text), meta))


class Variables:
    """Values by name.

    Attributes:
        values: values that are set.
        metas: the back end's meta information.
        parsers: functions that turn a text into its typed value.
        streams: the latest stream of each name.
        abandoned: names that would have been set again when the program failed.
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
        """A queued expression will set `name`."""
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
        """Set `name`, as a queued expression announced."""
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
        """Begin a stream of `name`."""
        self.streams[name] = stream

    def abandon(self) -> None:
        """Note that the program failed, so that expected variables are never set."""
        self.abandoned.update(self._expected)
        self._expected.clear()

    def copy(self) -> Variables:
        """Copy the containers; the values are shared."""
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
    """Splits the reasoning off a generation, whole or in pieces."""

    __slots__ = ("_model_type", "_parser", "_prompt_tail")

    def __init__(self, model_type: str, prompt_tail: str) -> None:
        """Find the parser.

        Args:
            model_type: name of the parser, `qwen3` for example.
            prompt_tail: the open turn's text, which may have opened the reasoning already.

        Raises:
            ValueError: no such parser; the message lists the known ones.
        """
        # The server's parsers; they need no torch.
        from openai_api.reasoning_parsers.registry import REASONING_PARSERS

        kind = REASONING_PARSERS.load(model_type)
        self._model_type = model_type
        self._prompt_tail = prompt_tail
        is_open = prompt_tail.rstrip().endswith(kind.markers[0]) if kind.markers else False
        self._parser = kind(prompt_is_open=is_open)

    def fresh(self) -> Splitter:
        """A new splitter with the same settings."""
        return Splitter(self._model_type, self._prompt_tail)

    def feed(self, text: str) -> Split:
        """Add more output and return the new reasoning and answer in it."""
        return _joined(self._parser.feed(text))

    def finish(self) -> Split:
        """Return the output that was held back."""
        return _joined(self._parser.finish())

    def whole(self, text: str) -> Split:
        """Split a whole output."""
        return _joined([self.feed(text), self.finish()])


def _joined(parts: Iterable[tuple[str, str]]) -> Split:
    reasoning, content = zip(("", ""), *parts, strict=True)
    return Split("".join(reasoning), "".join(content))
