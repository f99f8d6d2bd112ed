"""Makes call ids in the form that a model's chat template accepts, for new and earlier calls.

Templates of some families refuse ids of another form, and some models were trained with ids that
count their calls. An id of another form is replaced by a valid one, in the call and in its result.
The new id depends only on the conversation up to the call, so that prompts with a common prefix
have the same ids and share the prefix cache.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.requests.random_hex import random_bytes

Message = dict[str, Any]

_ALPHANUMERICS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_NAME_AND_INDEX = re.compile(r"functions\.(.+):[0-9]+", re.DOTALL)
# The prefix that this server's `/v1/messages` puts before ids.
PREFIX = "toolu_"


class IdForm(Protocol):
    """The form of the call ids of one model family."""

    def fits(self, call_id: str) -> bool:
        """Whether `call_id` has this form."""

    def new(self, name: str, index: int) -> str:
        """Return an id for a call in the model's new output.

        Args:
            name: the name of the function.
            index: the index of the call among all calls of the conversation.
        """

    def mapped(self, call_id: str, name: str, index: int) -> str:
        """Return an id for an earlier call whose id is missing or has another form.

        Equal arguments give equal ids.

        Args:
            call_id: the id as the client sent it; empty if there is none.
            name: the name of the function.
            index: the index of the call among all calls of the conversation.
        """


class NineAlphanumerics:
    """Mistral's form: nine letters and digits, as in `a1B2c3D4e`. Its templates refuse others."""

    def fits(self, call_id: str) -> bool:
        """Whether `call_id` consists of nine letters and digits."""
        return _NINE.fullmatch(call_id) is not None

    def new(self, name: str, index: int) -> str:
        """Return nine random letters and digits; the arguments have no effect."""
        del name, index
        return _nine(int.from_bytes(random_bytes(16)))

    def mapped(self, call_id: str, name: str, index: int) -> str:
        """Return nine letters and digits, from a hash of `call_id` or else of name and index."""
        named = call_id or f"{name}:{index}"
        number = int.from_bytes(hashlib.sha256(named.encode("utf-8", "surrogatepass")).digest())
        return _nine(number)


def _nine(number: int) -> str:
    letters = []
    for _ in range(9):
        number, letter = divmod(number, len(_ALPHANUMERICS))
        letters.append(_ALPHANUMERICS[letter])
    return "".join(letters)


class NameAndIndex:
    """Kimi K2's form: `functions.name:0`, where the number counts the calls of the conversation."""

    def fits(self, call_id: str) -> bool:
        """Whether `call_id` is `functions.`, a name, a colon and a number."""
        return _NAME_AND_INDEX.fullmatch(call_id) is not None

    def new(self, name: str, index: int) -> str:
        """Return the id of the call with this name and index."""
        return f"functions.{name}:{index}"

    def mapped(self, call_id: str, name: str, index: int) -> str:
        """Return the id of the call with this name and index, whatever `call_id` is."""
        del call_id
        return self.new(name, index)


@dataclass(frozen=True)
class AnswerIds:
    """Makes the ids of an answer's calls.

    Attributes:
        form: the form of the ids; None if calls keep the ids that the model writes.
        calls_before: number of earlier calls in the conversation, which some ids count.
    """

    form: IdForm | None = None
    calls_before: int = 0

    def of(self, name: str, own: str | None, index: int) -> str | None:
        """Return the id of a call of the answer.

        Args:
            name: name of the called function.
            own: the id that the model wrote; `None` if it wrote none. It is kept if it has the
                required form or no form is required; otherwise a new id is made.
            index: index of the call in the answer.

        Returns:
            The id; `None` if the model wrote none and no form is required.
        """
        if self.form is None or (own is not None and self.form.fits(own)):
            return own
        return self.form.new(name, self.calls_before + index)


def with_ids(messages: list[Message], form: IdForm | None) -> list[Message]:
    """Return messages for a template, with all call ids in `form`; unchanged if `form` is None."""
    if form is None:
        return messages
    ids = _Ids(form)
    return [ids.settled(message) for message in messages]


def _calls(message: Message) -> list[Message]:
    return message.get("tool_calls") or []


class _Ids:
    """Replaces the call ids of a conversation, message by message from its beginning."""

    def __init__(self, form: IdForm) -> None:
        self._form = form
        self._num_calls = 0
        # Maps an id that the client sent to its replacement. If calls have equal ids, the last one
        # counts.
        self._mapped: dict[str, str] = {}
        self._waiting = _Waiting()

    def settled(self, message: Message) -> Message:
        if calls := _calls(message):
            self._waiting = _Waiting()
            return {**message, "tool_calls": [self._settled_call(call) for call in calls]}
        if message["role"] == "tool" and (found := self._returned(message)):
            return {**message, "tool_call_id": found}
        return message

    def _settled_call(self, call: Message) -> Message:
        sent, name = call.get("id") or "", call["function"]["name"]
        found = self._in_form(sent, name)
        self._num_calls += 1
        self._mapped[sent] = found
        self._waiting.add(sent, name, found)
        return {**call, "id": found}

    def _returned(self, message: Message) -> str:
        sent = message.get("tool_call_id") or ""
        found = self._waiting.take(sent, message.get("name") or "")
        if not found and sent:
            found = self._mapped.get(sent) or self._in_form(sent, message.get("name") or "")
        return found

    def _in_form(self, sent: str, name: str) -> str:
        for known in (sent, sent.removeprefix(PREFIX)):
            if self._form.fits(known):
                return known
        return self._form.mapped(sent, name, self._num_calls)


class _Waiting:
    """The calls of one message whose results have not been seen yet."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._answered: set[int] = set()
        self._by_id: dict[str, deque[int]] = defaultdict(deque)
        self._by_name: dict[str, deque[int]] = defaultdict(deque)
        self._in_order: deque[int] = deque()

    def add(self, sent: str, name: str, found: str) -> None:
        place = len(self._found)
        self._found.append(found)
        for queue in (self._by_id[sent], self._by_name[name], self._in_order):
            queue.append(place)

    def take(self, sent: str, name: str) -> str:
        """Return the new id of the call that a result belongs to; empty if there is none.

        The call is found by the id `sent`. Without an id, it is found by the function's name, or
        else is the first call without a result.
        """
        queues = [self._by_id[sent]] if sent else [self._by_name[name], self._in_order]
        for queue in queues:
            while queue:
                place = queue.popleft()
                if place not in self._answered:
                    self._answered.add(place)
                    return self._found[place]
        return ""
