"""Decodes a request's JSON body strictly into a typed struct; used by every HTTP API.

Booleans and strings are not accepted as numbers, `NaN` is refused, nesting is limited, and a key
may appear only once. So a body that passes has only one meaning: a proxy in front of the server
cannot read it differently.
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

# Bytes. Bodies up to this size are decoded on the event loop: usual ones in less than a
# millisecond, the worst in two.
INLINE_BYTES = 64 * 1024
# Bytes. The objects of larger bodies are freed piece by piece; see `free_politely`.
_FREED_POLITELY_BYTES = 2**21
# So many numbers are freed in five milliseconds.
_FREED_AT_ONCE = 2**19
_FREED_AFTER_S = 1.0

# Bytes. Larger bodies are not checked for repeated keys (in practice they are token ids). The check
# parses in Python, about 12 ms for each MiB, which would stall the streams on this event loop.
DUPLICATE_CHECK_BYTES = 256 * 1024
# The most quotes in a body for which a quick check comes first; with more it would not be quick.
_MAX_QUOTES = 256
# Matches strings of JSON without escapes; the second group is there if the string is a key.
_STRINGS = re.compile(rb'"([^"]*)"(\s*:)?')


async def read_json(body: Body, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a body of any size, and record its ignored fields.

    Raises:
        InvalidBody: for the reasons of `decode_body`, or because the body has more numbers,
            strings, lists and objects than a request may have.
        Overloaded: too many large bodies are waiting.
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
        unknown: a list, to which names of ignored fields are added.

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
    """Decode a body.

    Args:
        body: the JSON.
        decoder: decodes it.
        unknown: a list, to which names of ignored fields are added.

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
            # Most bodies have only known fields, so the first reading succeeds.
            with contextlib.suppress(msgspec.ValidationError):
                return cast("T", strict.decode(body))
        unknown += unknown_fields(body, decoder.type)
    return absent_nulls.decode(body, decoder)


async def work_out(body_size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` and return its result; if `body_size` (bytes) is large, call it on a thread."""
    if body_size <= INLINE_BYTES:
        return work(*args, **kwargs)
    return await PREPARING.run(work, *args, **kwargs)


def let_go(lists: object, at_once: int = _FREED_AT_ONCE, after_s: float = _FREED_AFTER_S) -> None:
    """Free a list of lists on a thread, one by one; freeing eight million ids at once takes 0.1 s.

    Lists with other references are freed later, with the last reference.

    Args:
        lists: the list of lists; any other value is left alone.
        at_once: lists with at most so many numbers together are left to Python.
        after_s: seconds until freeing begins.
    """
    if not isinstance(lists, list) or not lists or not isinstance(lists[0], list):
        return
    if sum(len(each) for each in lists if isinstance(each, list)) <= at_once:
        return
    kept = [*lists]
    loop = asyncio.get_running_loop()
    # By then, a refused request's traceback no longer refers to the lists.
    loop.call_later(after_s, lambda: loop.create_task(PREPARING.run(_empty, kept)))


def _empty(lists: list[Any]) -> None:
    while lists:
        lists.pop()


def _all_keys_differ(body: bytes) -> bool:
    """Whether a quick check shows that no key of valid JSON appears twice.

    False means that the full check is needed. For a body with few strings, such as a prompt of
    token ids, the quick check takes a tenth of the time of the full one. (The full check also
    refuses invalid UTF-8 in values that the decoder skips.)
    """
    if b"\\" in body or not body.isascii() or body.count(b'"') > _MAX_QUOTES:
        return False
    keys = [string for string, colon in _STRINGS.findall(body) if colon]
    return len(set(keys)) == len(keys)


def _unique(pairs: list[tuple[str, object]]) -> None:
    # It returns None instead of a dict, because only the check is needed.
    if len({key for key, _ in pairs}) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidBody(f"The key {key[:64]!r} appears twice in one JSON object.")
            seen.add(key)


def _path_of(message: str) -> str | None:
    # msgspec ends its messages with the position: "... - at `$.sampling_params.n`".
    _, found, path = message.rpartition("- at `$.")
    return path.rstrip("`").split("[", 1)[0] or None if found else None
