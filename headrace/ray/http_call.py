"""An HTTP request and its answer on their way between Ray's actors.

Ray pickles what its actors exchange; these are plain bytes and text that our own actors made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

# Enough to tell prompts apart; a router's prefix tree holds every prompt that it has seen.
MAX_PROMPT_CHARACTERS = 32_768


@dataclass(frozen=True)
class HttpCall:
    """A request, whole.

    Attributes:
        method, path, query: of the request line.
        headers: names and values, as ASGI has them.
        body: the whole body.
        prompt: the beginning of the prompt's text, which Ray's prefix-aware router reads; never
            empty.
    """

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prompt: str


@dataclass(frozen=True)
class HttpHead:
    """What comes before the body of an answer.

    Attributes:
        status: the status code.
        headers: as ASGI has them.
    """

    status: int
    headers: list[tuple[bytes, bytes]]


class _Prompt(msgspec.Struct):
    """The fields of every API that hold the text of a prompt, in the order of the prompt."""

    system: Any = None
    instructions: Any = None
    messages: Any = None
    prompt: Any = None
    text: Any = None
    input: Any = None


_decoder = msgspec.json.Decoder(_Prompt)


def prompt_of(path: str, body: bytes) -> str:
    """Return the beginning of a prompt's text, or the path if the body has no text."""
    try:
        fields = msgspec.structs.astuple(_decoder.decode(body))
    except msgspec.DecodeError:
        return path
    found: list[str] = []
    room = MAX_PROMPT_CHARACTERS
    for text in _texts(fields):
        found.append(text[:room])
        room -= len(text)
        if room <= 0:
            break
    return "\n".join(found) or path


def _texts(value: Any) -> Iterable[str]:
    """Every text in `value`, without the names of its fields."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, (list, tuple)):
            waiting.extend(reversed(each))
        elif isinstance(each, dict):
            waiting.extend(each[name] for name in ("text", "content") if name in each)
