"""Bytes that are not valid messages, and a ZMQ peer that never sends a complete message."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

# Frames that do not decode: first text that is not UTF-8 instead of a tag, then almost valid ones.
BAD_FRAMES = [
    bytes.fromhex("91a3ffffff"),
    bytes.fromhex("92a3ffffff01"),
    b"",
    b"\xc1",
    b"\x91" * 100_000,
    b"\x81\xa4type\xa3\xff\xfe\xfd",
    bytes.fromhex("dd7fffffff"),
    bytes.fromhex("c6ffffffff"),
    b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00" * 1_000_000,
]

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 4) + b"PUSH"


def push_peer(path: Path) -> socket.socket:
    """Connect to a ZMQ socket at `path`, and complete the handshake as a PUSH socket."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(20)
    peer.connect(str(path))
    peer.sendall(_GREETING + b"\x04" + bytes([len(_READY)]) + _READY)
    received = b""
    while b"Socket-Type" not in received:
        part = peer.recv(4096)
        assert part, "the handshake was refused"
        received += part
    return peer


def frame_header(size_bytes: int) -> bytes:
    """Return the header of one long frame."""
    return b"\x02" + struct.pack(">Q", size_bytes)
