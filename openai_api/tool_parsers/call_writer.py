"""Collects the texts and calls that a tool-call parser finds."""

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
    """Collects texts and calls; calls beyond `max_calls` are dropped.

    Attributes:
        functions: the functions that the request offers.
        has_called: whether a call has begun.
        is_open: whether a call has begun and not ended.
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
        """Add text outside calls."""
        if text:
            self._parts.append(text)

    def offers(self, name: str | None) -> bool:
        """Whether the request offers the function `name`; the first name not offered is logged."""
        if name in self.functions:
            return True
        if not self._has_warned:
            # It is logged once, because an output may contain a hundred thousand such calls.
            self._has_warned = True
            logger.warning("The model called a function that the request does not offer")
        return False

    def begin(self, name: str, call_id: str | None = None) -> bool:
        """Begin a call. If the request does not offer the function, do nothing and return false."""
        if not self.offers(name):
            return False
        self._is_dropped = self._left == 0
        if self._left:
            self._left -= 1
        self.has_called = self.is_open = True
        self._put(CallBegin(name, call_id))
        return True

    def arguments(self, text: str) -> None:
        """Add more arguments of the open call."""
        if text:
            self._put(CallArguments(text))

    def end(self, *, is_complete: bool) -> None:
        """End the open call."""
        self.is_open = False
        self._put(CallEnd(is_complete))

    def call(self, name: str, arguments: str) -> bool:
        """Write a complete call; return false if the request does not offer the function."""
        if not self.begin(name):
            return False
        self.arguments(arguments)
        self.end(is_complete=True)
        return True

    def take(self) -> list[ToolPart]:
        """Return the parts since the last call of this method."""
        parts, self._parts = self._parts, []
        return parts

    def _put(self, part: ToolPart) -> None:
        if not self._is_dropped:
            self._parts.append(part)
