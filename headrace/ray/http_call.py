"""An HTTP request and its answer, as Ray's actors send them to each other.

Ray pickles the messages between its actors. These messages consist of bytes and text, and only our
own actors make them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

# Enough characters to distinguish prompts. The number is limited, because a router's prefix tree
# stores every prompt that it has seen.
MAX_PROMPT_CHARACTERS = 32_768


@dataclass(frozen=True)
class Resumption:
    """The data with which a replica continues an answer that another replica began.

    Attributes:
        key, created: the fields of the answer's `Identity`.
        entries: entries of the answer's `AnswerJournal`; empty until a part of the answer was sent.
    """

    key: bytes
    created: int
    entries: list[bytes]


@dataclass(frozen=True)
class HttpCall:
    """A complete HTTP request.

    Attributes:
        method, path, query: parts of the request line.
        headers: names and values, in ASGI's form.
        body: the whole body.
        prompt: the beginning of the prompt's text, which Ray's prefix-aware router reads; it is
            never empty.
        resumption: set if another replica may continue the answer.
    """

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prompt: str
    resumption: Resumption | None = None


@dataclass(frozen=True)
class HttpHead:
    """The status and the headers of an HTTP answer.

    Attributes:
        status: the status code.
        headers: names and values, in ASGI's form.
    """

    status: int
    headers: list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class HttpPart:
    """A part of the body of an HTTP answer.

    Attributes:
        body: the bytes of this part.
        entries: entries that were added to the `AnswerJournal` before these bytes were made.
    """

    body: bytes
    entries: list[bytes]


# Routes whose requests store nothing at the replica that answers, so any replica may answer them.
_POSTED = frozenset(
    [
        "/generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/classify",
        "/v1/rerank",
        "/rerank",
        "/v2/rerank",
        "/v1/score",
        "/v1/select",
        "/encode",
        "/classify",
        "/pooling",
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
        "/apply_chat_template",
        "/parse_function_call",
        "/separate_reasoning",
        "/api/generate",
        "/api/chat",
        "/api/embed",
        "/api/embeddings",
        "/api/show",
    ]
)
_CHANGED = frozenset(
    [
        "/flush_cache",
        "/abort_request",
        "/close_session",
        "/open_session",
        "/pause_generation",
        "/continue_generation",
    ]
)
# Routes that read data of a single replica; an answer would look as if it were about all replicas.
_OF_ONE = ("/v1/files", "/v1/batches", "/v1/responses/", "/v1/loads", "/get_load", "/last_errors")


def is_for_any_replica(method: str, path: str) -> bool:
    """Whether a request has the same result at any of several replicas.

    It is false for requests that change a replica (weights, adapters, cache, sessions), and for
    requests that read data of one replica (files, batches, stored responses).
    """
    if method == "POST":
        return path in _POSTED
    if method in ("GET", "HEAD", "OPTIONS"):
        return path not in _CHANGED and not path.startswith(_OF_ONE)
    return False


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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The body is malformed; the replica will answer with an error that says why.
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
    """Yield every text within `value`, without the names of fields."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, (list, tuple)):
            waiting.extend(reversed(each))
        elif isinstance(each, dict):
            waiting.extend(each[name] for name in ("text", "content") if name in each)
