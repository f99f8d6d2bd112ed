"""Draws a table of counts as a PNG, without a library.

Source: PNG Specification, third edition (W3C), sections 5 and 11.2.
"""

from __future__ import annotations

import struct
import zlib

from headrace.experts.balance import Counts

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Eight bits a channel, true colour.
_DEPTH, _COLOUR = 8, 2
# Approximate width of the widest picture, and size of the largest cell, in pixels.
_WIDEST, _LARGEST_CELL = 4096, 12
_UNUSED = (255, 255, 255)
_LIGHT, _DARK = (222, 235, 247), (8, 48, 107)


def heat_map(counts: Counts) -> bytes:
    """Return a PNG with a row of cells for each layer and a cell for each expert.

    The most used expert of a layer has the layer's darkest cell; unused experts are white.
    """
    cell = max(1, min(_LARGEST_CELL, _WIDEST // len(counts[0])))
    lines = []
    for row in counts:
        most = max(row)
        pixels = b"".join(bytes(_colour(count, most)) * cell for count in row)
        # Each line begins with its filter type, which is "none".
        lines += [b"\0" + pixels] * cell
    size = len(counts[0]) * cell, len(counts) * cell
    header = struct.pack(">IIBBBBB", *size, _DEPTH, _COLOUR, 0, 0, 0)
    return b"".join(
        (
            _SIGNATURE,
            _chunk(b"IHDR", header),
            _chunk(b"IDAT", zlib.compress(b"".join(lines))),
            _chunk(b"IEND", b""),
        )
    )


def _colour(count: int, most: int) -> tuple[int, ...]:
    if not count:
        return _UNUSED
    share = count / most
    return tuple(
        round(light + (dark - light) * share) for light, dark in zip(_LIGHT, _DARK, strict=True)
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
