"""Invalid messages at every socket of a running server, beside streams."""

from __future__ import annotations

import random
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from runtime.ipc.messages import DetokenizerInbound, FrontInbound, SchedulerInbound
from runtime.ipc.transport import MAX_FRAME_BYTES, RUN_FOLDER_PREFIX
from tests.support.frames import BAD_FRAMES, frame_header, push_peer
from tests.support.processes import engine_processes
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model

NUM_STREAMS = 4
_ANY_MESSAGE = [
    msgspec.msgpack.Decoder(union) for union in (SchedulerInbound, DetokenizerInbound, FrontInbound)
]


def frames() -> list[bytes]:
    """The known ones, and bytes drawn at random that no receiver takes for a message."""
    draw = random.Random(16)
    marks = (0x91, 0x92, 0x9A, 0xA3, 0xAF, 0xC4, 0xDD, 0x81, 0xFF)
    drawn = [
        bytes(draw.choice((*marks, draw.randrange(256))) for _ in range(draw.randrange(1, 40)))
        for _ in range(2000)
    ]
    return BAD_FRAMES + [
        payload for payload in drawn if not any(map(_decodes(payload), _ANY_MESSAGE))
    ]


def _decodes(payload: bytes) -> Any:
    def decodes(decoder: msgspec.msgpack.Decoder[Any]) -> bool:
        try:
            decoder.decode(payload)
        except Exception:
            return False
        return True

    return decodes


def sockets(server: ServerProcess) -> list[Path]:
    """Where this server's processes listen for each other."""
    prefix = f"/{RUN_FOLDER_PREFIX}{server.process.pid}-"
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sorted({Path(line.split()[-1]) for line in lines if prefix in line and "/" in line})


def child_pids(server: ServerProcess) -> dict[str, int]:
    return engine_processes(server.process.pid)


def rejected(server: ServerProcess) -> dict[str, int]:
    page = server.client.get("/metrics").text
    found = re.findall(r'rejected_messages_total\{.*component="(\w+)".*\} (\S+)', page)
    return {component: int(float(count)) for component, count in found}


class Streams:
    """Greedy streams that never pause, each answer compared with the first one."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url
        self._over = threading.Event()
        self._expected = self._one()
        self.wrong: list[str] = []
        self.num_done = 0
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_STREAMS)]

    def _one(self) -> str:
        sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7], "stream": True, "sampling_params": sampling}
        with httpx.stream("POST", f"{self._url}/generate", json=body, timeout=60) as response:
            *_, last, end = [line for line in response.iter_lines() if line]
        assert end == "data: [DONE]"
        return str(msgspec.json.decode(last.removeprefix("data: "))["text"])

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                text = self._one()
            except Exception as error:
                self.wrong.append(repr(error))
                return
            self.num_done += 1
            if text != self._expected:
                self.wrong.append(text)

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a stream hangs"


def test_every_process_drops_and_counts_them() -> None:
    args = ("--model-path", str(tiny_model("qwen3")), "--enable-metrics", "--num-threads", "1")
    context: zmq.Context[Any] = zmq.Context()
    with ServerProcess(*args) as server:
        server.wait_ready()
        before = child_pids(server)
        paths = sockets(server)
        # Of a worker, a detokenizer and the front; two more are about grammars.
        assert {path.name.partition("-")[0] for path in paths} >= {
            *("scheduler", "detokenizer", "front"),
        }
        bad = frames()
        with Streams(server) as streams:
            for path in paths:
                outbox = context.socket(zmq.PUSH)
                outbox.connect(f"ipc://{path}")
                for payload in bad:
                    outbox.send(payload)
                # All of it, before this peer goes.
                outbox.close(linger=20_000)
                with push_peer(path) as peer:
                    peer.sendall(frame_header(MAX_FRAME_BYTES + 1) + b"x")
                    assert peer.recv(1) == b""
                with push_peer(path) as peer:
                    peer.sendall(frame_header(1 << 20) + b"x")
                with push_peer(path) as peer:
                    peer.sendall(bytes(1000) + random.Random(1).randbytes(5000))
            context.term()
            # And the empty frames of the last peer.
            while min(rejected(server).values()) < len(bad):
                assert not streams.wrong
            num_done = streams.num_done
            while streams.num_done < num_done + 2 * NUM_STREAMS and not streams.wrong:
                assert server.client.get("/health").status_code == 200
        assert not streams.wrong
        assert child_pids(server) == before
        structured = {"max_new_tokens": 8, "regex": "[a-c]{4}"}
        body = {"text": "x", "sampling_params": structured}
        if "grammar" in before:
            assert server.client.post("/generate", json=body).status_code == 200
