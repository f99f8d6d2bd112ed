"""Fields of a request that the server ignores: they are reported in a header and in the log.

The HTTP entry opens a record for each request. Reading the JSON body adds the names of ignored
fields to it. The response lists them in a header. The log has each name once per route.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

import msgspec

logger = logging.getLogger(__name__)

HEADER = "x-ignored-fields"
# Most names that are kept for a request, and most characters of a name.
_MAX_NAMES = 64
_MAX_NAME_CHARS = 64
# Clients and proxies bound the length of a header; 8 KiB is the smallest of the usual bounds.
_MAX_HEADER_BYTES = 1024
# Most pairs of a name and a route that are logged. Further ones are only in the header.
MAX_LOGGED = 1024
# Characters that need no encoding in the header: no blank, no comma, no percent sign.
_PLAIN = "!#$&'*+-.^_`|~[]{}():;<>=@/?"

LOGGED: set[tuple[str, str]] = set()
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])


class IgnoredFields:
    """The names of the fields of one request that the server ignores.

    Attributes:
        names: names of ignored fields, in the body's order.
    """

    def __init__(self, route: str) -> None:
        """Start without names; `route` is the registered path, for the log."""
        self.names: list[str] = []
        self._route = route

    def add(self, names: Iterable[str]) -> None:
        """Add names and log those that are new for the route."""
        for name in names:
            if name in self.names or len(self.names) >= _MAX_NAMES:
                continue
            self.names.append(name)
            pair = (self._route, name)
            if pair in LOGGED or len(LOGGED) >= MAX_LOGGED:
                continue
            LOGGED.add(pair)
            logger.warning(
                "%s: the field %a is ignored; this route does not know it", self._route, name
            )

    def header(self) -> str:
        """The names, separated by commas.

        Characters that a header cannot have are percent-encoded.
        """
        found: list[str] = []
        num_bytes = 0
        for name in self.names:
            # UTF-8 cannot encode half a surrogate pair.
            encoded = quote(name, safe=_PLAIN, errors="replace")
            num_bytes += len(encoded) + 2
            if num_bytes > _MAX_HEADER_BYTES:
                found.append("...")
                break
            found.append(encoded)
        return ", ".join(found)


# The HTTP entry sets this for each request, and a batch sets it for each line.
IGNORED: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


def unknown_fields(body: bytes, decoder_type: Any) -> list[str]:
    """Return the keys of a JSON object that are not fields of the struct `decoder_type`.

    Args:
        body: valid JSON.
        decoder_type: the type that `body` was decoded into; for types other than structs, no key
            counts as unknown.
    """
    known = _known_fields(decoder_type)
    if known is None:
        return []
    try:
        keys = _top_level.decode(body)
    except msgspec.DecodeError:
        return []
    found = [key[:_MAX_NAME_CHARS] for key in keys if key not in known]
    return found[:_MAX_NAMES]


def note_ignored(names: Iterable[str]) -> None:
    """Add `names` to the record of the current request, if there is one."""
    ignored = IGNORED.get()
    if ignored is not None:
        ignored.add(names)


@functools.cache
def strict_decoder(decoder_type: Any) -> msgspec.json.Decoder[Any] | None:
    """A decoder that refuses unknown keys of the struct `decoder_type`; `None` for other types.

    The decoder returns instances of a subclass, so that nothing is read twice to find those keys.
    """
    if _known_fields(decoder_type) is None:
        return None
    return msgspec.json.Decoder(
        msgspec.defstruct(
            decoder_type.__name__, [], bases=(decoder_type,), forbid_unknown_fields=True
        )
    )


@functools.cache
def _known_fields(decoder_type: Any) -> frozenset[str] | None:
    if not (isinstance(decoder_type, type) and issubclass(decoder_type, msgspec.Struct)):
        return None
    tag = decoder_type.__struct_config__.tag_field
    names = (field.encode_name for field in msgspec.structs.fields(decoder_type))
    return frozenset(names) | ({tag} if tag else set())
