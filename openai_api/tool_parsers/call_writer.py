"""What a tool-call parser has read, collected as the parts that it hands on."""

from __future__ import annotations

import logging

from openai_api.tool_parsers.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Functions,
    ToolPart,
)

logger = logging.getLogger(__name__)


class CallWriter:
    """Collects texts and calls; calls beyond the most that are wanted are dropped.

    Attributes:
        functions: that the request offers.
        has_called: whether a call has begun.
        is_open: whether one has begun and not ended.
    """

    def __init__(self, functions: Functions, max_calls: int | None) -> None:
        """Accept at most `max_calls` calls of `functions`."""
        self.functions = functions
        self.has_called = False
        self.is_open = False
        self._left = max_calls
        self._is_dropped = False
        self._has_warned = False
        self._parts: list[ToolPart] = []

    def text(self, text: str) -> None:
        """Text outside calls."""
        if text:
            self._parts.append(text)

    def offers(self, name: str | None) -> bool:
        """Whether the request offers such a function; what it does not is logged."""
        if name in self.functions:
            return True
        if not self._has_warned:
            # Once: an output may hold a hundred thousand of them.
            self._has_warned = True
            logger.warning("The model called a function that the request does not offer")
        return False

    def begin(self, name: str, call_id: str | None = None) -> bool:
        """Begin a call; false, and nothing happens, when the request offers no such function."""
        if not self.offers(name):
            return False
        self._is_dropped = self._left == 0
        if self._left:
            self._left -= 1
        self.has_called = self.is_open = True
        self._put(CallBegin(name, call_id))
        return True

    def arguments(self, text: str) -> None:
        """More arguments of the open call."""
        if text:
            self._put(CallArguments(text))

    def end(self, *, is_complete: bool) -> None:
        """End the open call."""
        self.is_open = False
        self._put(CallEnd(is_complete))

    def call(self, name: str, arguments: str) -> bool:
        """A complete call at once; false when it is not offered."""
        if not self.begin(name):
            return False
        self.arguments(arguments)
        self.end(is_complete=True)
        return True

    def take(self) -> list[ToolPart]:
        """The parts since the last time."""
        parts, self._parts = self._parts, []
        return parts

    def _put(self, part: ToolPart) -> None:
        if not self._is_dropped:
            self._parts.append(part)
