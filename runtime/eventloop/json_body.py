"""A request's JSON body, decoded strictly into a typed struct; used by every HTTP wire.

Booleans and strings are not accepted as numbers, `NaN` is refused, nesting is bounded, and a key
may appear only once. So a proxy in front of the server reads the same request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import msgspec

from runtime.eventloop import absent_nulls
from runtime.eventloop.body_errors import InvalidBody, explain, not_json
from runtime.eventloop.heavy_work import PREPARING, free_politely
from runtime.eventloop.ignored_fields import note_ignored, strict_decoder, unknown_fields
from runtime.eventloop.large_body import PIECE_BYTES, WINDOW, Body, split_lists
from runtime.requests.arrival import timed

P = ParamSpec("P")
T = TypeVar("T")

# Bytes decoded on the event loop: usual requests take less than a millisecond, the worst take two.
INLINE_BYTES = 64 * 1024
# The objects of larger bodies are freed piece by piece.
_FREED_POLITELY_BYTES = 2**21
# Number of numbers whose memory is freed in five milliseconds.
_FREED_AT_ONCE = 2**19
_FREED_AFTER_S = 1.0

# The check for duplicate keys parses in Python and takes about 12 ms per MiB. Large bodies (in
# practice token ids) are not checked, because that would stall the streams that share the event
# loop.
DUPLICATE_CHECK_BYTES = 256 * 1024
# A quick check comes first. It is quick only for bodies with few strings.
_MAX_QUOTES = 256
# The strings of JSON without escapes; a key has a second group.
_STRINGS = re.compile(rb'"([^"]*)"(\s*:)?')


async def read_json(body: Body, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a body of any size; see `decode_body`. Ignored fields are recorded.

    Raises:
        InvalidBody: for the reasons of `decode_body`, or the body has more numbers, strings, lists
            and objects than a request may have.
        Overloaded: too many large bodies wait.
    """
    unknown: list[str] = []
    if len(body) <= INLINE_BYTES:
        with timed("parse"):
            decoded = decode_body(bytes(body), decoder, unknown)
    else:
        with timed("parse"):
            decoded = await PREPARING.run(decode_large, body, decoder, unknown=unknown)
        if len(body) > _FREED_POLITELY_BYTES:
            free_politely(decoded)
    if unknown:
        note_ignored(unknown)
    return decoded


def decode_large(
    body: Body,
    decoder: msgspec.json.Decoder[T],
    piece_bytes: int = PIECE_BYTES,
    window: int = WINDOW,
    unknown: list[str] | None = None,
) -> T:
    """Decode a large body piece by piece; call this on a thread.

    Args:
        body: the JSON.
        decoder: decodes it.
        piece_bytes: bytes that the decoder gets at a time.
        window: bytes that one call of a regular expression scans.
        unknown: list to which names of ignored fields are added.

    Raises:
        InvalidBody: for the reasons of `read_json`.
    """
    rest, lists = split_lists(body, decoder.type, piece_bytes, window)
    decoded = decode_body(bytes(rest), decoder, unknown)
    for attribute, items in lists.items():
        msgspec.structs.force_setattr(cast("msgspec.Struct", decoded), attribute, items)
    return decoded


def decode_body(
    body: bytes, decoder: msgspec.json.Decoder[T], unknown: list[str] | None = None
) -> T:
    """Decode `body`.

    Args:
        body: the JSON.
        decoder: decodes it.
        unknown: list to which names of ignored fields are added.

    Raises:
        InvalidBody: the body is not JSON, or has a value of the wrong type (the message has its
            JSON path), a repeated key, or too deep nesting.
    """
    try:
        decoded = _decode_noting(body, decoder, unknown)
        if len(body) <= DUPLICATE_CHECK_BYTES and not _all_keys_differ(body):
            json.loads(body, object_pairs_hook=_unique)
    except msgspec.ValidationError as error:
        message = explain(error, decoder.type)
        raise InvalidBody(message, param=_path_of(message)) from None
    except InvalidBody:
        raise
    except RecursionError:
        raise InvalidBody("The JSON body is nested too deeply.") from None
    except UnicodeDecodeError:
        raise InvalidBody("The JSON body is not valid UTF-8.") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise not_json(str(error) if body else "the body is empty") from None
    return decoded


def _decode_noting(body: bytes, decoder: msgspec.json.Decoder[T], unknown: list[str] | None) -> T:
    if unknown is not None:
        strict = strict_decoder(cast("Any", decoder.type))
        if strict is not None:
            # Most bodies have known fields only, and are read once.
            with contextlib.suppress(msgspec.ValidationError):
                return cast("T", strict.decode(body))
        unknown += unknown_fields(body, decoder.type)
    return absent_nulls.decode(body, decoder)


async def work_out(body_size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, whose time grows with the body: on a thread unless the body is small."""
    if body_size <= INLINE_BYTES:
        return work(*args, **kwargs)
    return await PREPARING.run(work, *args, **kwargs)


def let_go(lists: object, at_once: int = _FREED_AT_ONCE, after_s: float = _FREED_AFTER_S) -> None:
    """Free a list of lists one by one on a thread; freeing eight million ids at once takes 0.1 s.

    Lists with other references are freed later, with the last reference. At most `at_once` numbers
    are left to Python, because freeing them is fast.
    """
    if not isinstance(lists, list) or not lists or not isinstance(lists[0], list):
        return
    if sum(len(each) for each in lists if isinstance(each, list)) <= at_once:
        return
    kept = [*lists]
    loop = asyncio.get_running_loop()
    # By then a refused request is gone, together with its traceback.
    loop.call_later(after_s, lambda: loop.create_task(PREPARING.run(_empty, kept)))


def _empty(lists: list[Any]) -> None:
    while lists:
        lists.pop()


def _all_keys_differ(body: bytes) -> bool:
    """Whether a quick look shows that no key of valid JSON appears twice.

    For a body with few strings, such as a prompt of token ids, this takes a tenth of the time of
    the full check. The full check also refuses invalid UTF-8 in values that the decoder skips.
    """
    if b"\\" in body or not body.isascii() or body.count(b'"') > _MAX_QUOTES:
        return False
    keys = [string for string, colon in _STRINGS.findall(body) if colon]
    return len(set(keys)) == len(keys)


def _unique(pairs: list[tuple[str, object]]) -> None:
    # This returns None, because only the check is needed, not the objects.
    if len({key for key, _ in pairs}) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidBody(f"The key {key[:64]!r} appears twice in one JSON object.")
            seen.add(key)


def _path_of(message: str) -> str | None:
    # msgspec ends its messages with the place: "... - at `$.sampling_params.n`".
    _, found, path = message.rpartition("- at `$.")
    return path.rstrip("`").split("[", 1)[0] or None if found else None
