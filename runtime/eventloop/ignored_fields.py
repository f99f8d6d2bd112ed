"""Reports the fields of a request that the server does not know and ignores.

The HTTP entry opens a record for each request. Reading the JSON body adds the names of ignored
fields to it. The response lists them in a header. The log has each name once for each route.
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
# The most names that are kept for a request, and the most characters of a name.
_MAX_NAMES = 64
_MAX_NAME_CHARS = 64
# The most bytes of the header's value. Clients and proxies limit a header, usually to 8 KiB or
# more.
_MAX_HEADER_BYTES = 1024
# The most pairs of route and name that are logged. Further ones are only in the header.
MAX_LOGGED = 1024
# Characters that are not percent-encoded in the header. Blank, comma and percent sign are.
_PLAIN = "!#$&'*+-.^_`|~[]{}():;<>=@/?"

LOGGED: set[tuple[str, str]] = set()
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])


class IgnoredFields:
    """The fields of one request that the server ignores.

    Attributes:
        names: their names, in the body's order.
    """

    def __init__(self, route: str) -> None:
        """Begin without names; `route` is the route's registered path, for the log."""
        self.names: list[str] = []
        self._route = route

    def add(self, names: Iterable[str]) -> None:
        """Add names; log those that are new for the route."""
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
        """Return the header's value: the names, separated by commas.

        Characters that a header cannot have are percent-encoded.
        """
        found: list[str] = []
        num_bytes = 0
        for name in self.names:
            # Half a surrogate pair cannot be encoded, so it is replaced.
            encoded = quote(name, safe=_PLAIN, errors="replace")
            num_bytes += len(encoded) + 2
            if num_bytes > _MAX_HEADER_BYTES:
                found.append("...")
                break
            found.append(encoded)
        return ", ".join(found)


# The current request's record, set by the HTTP entry, and by a batch for each of its lines.
IGNORED: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


def unknown_fields(body: bytes, decoder_type: Any) -> list[str]:
    """Return the keys of a JSON object that are not fields of the struct `decoder_type`.

    Args:
        body: valid JSON.
        decoder_type: the type that `body` is decoded into. If it is not a struct, no key counts as
            unknown.
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
    """Add `names` to the current request's record, if there is one."""
    ignored = IGNORED.get()
    if ignored is not None:
        ignored.add(names)


@functools.cache
def strict_decoder(decoder_type: Any) -> msgspec.json.Decoder[Any] | None:
    """Return a decoder that refuses unknown keys of the struct `decoder_type`.

    It decodes into a subclass of the struct. So a body without unknown keys is read only once.

    Returns:
        `None` if `decoder_type` is not a struct.
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
