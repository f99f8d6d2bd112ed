"""A request's JSON body, decoded strictly into a typed struct; used by every HTTP wire.

A boolean is no number, a string is no number, `NaN` is no JSON, nesting has a bound and a key may
appear once: what a proxy in front read is what is served.
"""

from __future__ import annotations

import json
from typing import TypeVar

import msgspec

from runtime.client.expected import explain
from runtime.errors import InvalidRequest

T = TypeVar("T")

# The check for duplicate keys parses in Python, about 12 ms per MiB: large bodies (token ids, in
# practice) go without it rather than stall the streams that share the event loop.
DUPLICATE_CHECK_BYTES = 256 * 1024
# The quick look that may come before is one only where there are few strings.
_MAX_QUOTES = 256


class InvalidBody(InvalidRequest):
    """The body is not the JSON that the route asks for; the message names the place."""


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode `body`.

    Raises:
        InvalidBody: not JSON, a wrong type (with its JSON path), a key twice, nested too deeply.
    """
    try:
        decoded = decoder.decode(body)
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


def not_json(reason: str) -> InvalidBody:
    """What is raised for a body that is no JSON at all."""
    return InvalidBody(f"The body is not valid JSON: {reason}.")


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
