"""Greedy streams beside other load on a server; each must have the same text as without it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import orjson

from tests.support.server import ServerProcess

NUM_NEIGHBOURS = 3
# Pause between two streams of a thread, seconds. Without it the streams would use all CPU time.
PAUSE_S = 0.3


@dataclass
class Neighbours:
    """Runs greedy streams one after the other, on several threads, within a `with` block."""

    server: ServerProcess
    texts: list[str] = field(default_factory=list)

    def __enter__(self) -> Neighbours:
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_NEIGHBOURS)
        self._streams = [self._pool.submit(self._run) for _ in range(NUM_NEIGHBOURS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._pool.shutdown()
        for stream in self._streams:
            stream.result()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.texts.append(greedy(self.server))
            self._is_over.wait(PAUSE_S)


def greedy(server: ServerProcess) -> str:
    body = {
        "text": "The mill",
        "stream": True,
        "sampling_params": {"max_new_tokens": 50, "temperature": 0, "ignore_eos": True},
    }
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=240) as response:
        events = [line for line in response.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    return str(orjson.loads(events[-2].removeprefix("data: "))["text"])
