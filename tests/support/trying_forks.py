"""A module for fork servers: its jobs end in different ways, with little time."""

from __future__ import annotations

import os
import signal

from runtime.ipc.fork_server import serve
from runtime.ipc.limited_forks import ForkEnd, ForkLimits

MEMORY = 2**27


def work(job: bytes) -> bytes:
    match job:
        case b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"hang":
            signal.pause()
        case b"spin":
            while True:
                pass
        case b"eat":
            return bytes(2 * MEMORY)
        case b"fail":
            raise ValueError("of a library")
    return b"did " + job


def answer(end: ForkEnd) -> bytes:
    if end.got_no_processor:
        return b"busy"
    return end.answer or b"none"


if __name__ == "__main__":
    serve(work, answer, ForkLimits(timeout_s=1.5, cpu_s=0, memory_bytes=MEMORY), 3)
