"""A request's JSON body, decoded strictly into a typed struct; used by every HTTP wire.

A boolean is no number, a string is no number, `NaN` is no JSON, nesting has a bound and a key may
appear once: what a proxy in front read is what is served.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import msgspec

from runtime.eventloop import absent_nulls
from runtime.eventloop.body_errors import InvalidBody, explain, not_json
from runtime.eventloop.heavy_work import PREPARING, free_politely
from runtime.eventloop.ignored_fields import note_ignored, unknown_fields
from runtime.eventloop.large_body import PIECE_BYTES, WINDOW, Body, split_lists

P = ParamSpec("P")
T = TypeVar("T")

# Decoded at once: under a millisecond for what requests are made of, two for the worst.
INLINE_BYTES = 64 * 1024
# What a body became is freed piece by piece where it was larger.
_FREED_POLITELY_BYTES = 2**21
# Numbers whose memory is given back in five milliseconds.
_FREED_AT_ONCE = 2**19
_FREED_AFTER_S = 1.0

# The check for duplicate keys parses in Python, about 12 ms per MiB: large bodies (token ids, in
# practice) go without it rather than stall the streams that share the event loop.
DUPLICATE_CHECK_BYTES = 256 * 1024
# The quick look that may come before is one only where there are few strings.
_MAX_QUOTES = 256


async def read_json(body: Body, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a body of any size; see `decode_body`. Fields that it ignores are noted.

    Raises:
        InvalidBody: as `decode_body`; or more numbers, strings, lists and objects than a request
            may have.
        Overloaded: too many large bodies wait.
    """
    if len(body) <= INLINE_BYTES:
        raw = bytes(body)
        decoded, unknown = decode_body(raw, decoder), unknown_fields(raw, decoder.type)
    else:
        unknown = []
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
    """Decode a large body piece by piece; for a thread.

    Args:
        body: the JSON.
        decoder: what reads it.
        piece_bytes: what it gets at a time.
        window: bytes that one call of a regular expression looks at.
        unknown: gets the names of fields that are ignored.

    Raises:
        InvalidBody: see `read_json`.
    """
    rest, lists = split_lists(body, decoder.type, piece_bytes, window)
    raw = bytes(rest)
    decoded = decode_body(raw, decoder)
    if unknown is not None:
        unknown += unknown_fields(raw, decoder.type)
    for attribute, items in lists.items():
        msgspec.structs.force_setattr(cast("msgspec.Struct", decoded), attribute, items)
    return decoded


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode `body`.

    Raises:
        InvalidBody: not JSON, a wrong type (with its JSON path), a key twice, nested too deeply.
    """
    try:
        decoded = absent_nulls.decode(body, decoder)
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


async def work_out(body_size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, which takes as long as the body is large: on a thread unless that is small."""
    if body_size <= INLINE_BYTES:
        return work(*args, **kwargs)
    return await PREPARING.run(work, *args, **kwargs)


def let_go(lists: object, at_once: int = _FREED_AT_ONCE, after_s: float = _FREED_AFTER_S) -> None:
    """Have a list of lists freed one by one on a thread: at once, eight million ids take 0.1 s.

    What else refers to them keeps them; they are free once the last of all lets go. Up to `at_once`
    numbers are not worth it.
    """
    if not isinstance(lists, list) or not lists or not isinstance(lists[0], list):
        return
    if sum(len(each) for each in lists if isinstance(each, list)) <= at_once:
        return
    kept = [*lists]
    loop = asyncio.get_running_loop()
    # By then a request that was refused is gone, with its traceback.
    loop.call_later(after_s, lambda: loop.create_task(PREPARING.run(_empty, kept)))


def _empty(lists: list[Any]) -> None:
    while lists:
        lists.pop()


def _all_keys_differ(body: bytes) -> bool:
    """Whether no key appears twice anywhere in valid JSON; false where that is hard to say.

    A prompt of token ids has few strings, and this takes a tenth of the time of the check, which
    also refuses bytes that are no UTF-8 where the decoder skips them.
    """
    if b"\\" in body or not body.isascii() or body.count(b'"') > _MAX_QUOTES:
        return False
    parts = body.split(b'"')
    strings = zip(parts[1::2], parts[2::2], strict=True)
    keys = [string for string, after in strings if after.lstrip().startswith(b":")]
    return len(set(keys)) == len(keys)


def _unique(pairs: list[tuple[str, object]]) -> None:
    # Returns nothing: only the check is wanted, not the objects.
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
