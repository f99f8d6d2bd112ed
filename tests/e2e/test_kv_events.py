"""A server publishes what its prefix cache stores, to a subscriber that knows vLLM's messages."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import zmq

from tests.support.server import ServerProcess, free_port
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

IDS = [5, 6, 7, 8] * 10


def test_a_subscriber_learns_what_is_cached_and_when_it_is_gone() -> None:
    endpoints = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    # The request of a warm-up could share the first message.
    options = ("--page-size", "16", "--skip-server-warmup")
    options += ("--kv-events-config", json.dumps(endpoints))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    with ServerProcess("--model-path", str(tiny_model("llama")), *options) as server:
        server.wait_ready()
        reader.connect(endpoints["endpoint"])
        asker.connect(endpoints["replay_endpoint"])
        # All from the beginning: the subscription may have come too late for the first.
        payload = b""
        # The worker may be ready before it has published anything, and then there is nothing yet.
        while not payload:
            asker.send_multipart([b"", (0).to_bytes(8, "big")])
            _, _, payload = asker.recv_multipart()
        assert msgspec.msgpack.decode(payload)[1] == [["AllBlocksCleared"]]
        events: list[Any] = []

        def found(kind: str) -> list[Any]:
            while reader.poll(0):
                events.extend(msgspec.msgpack.decode(reader.recv_multipart()[2])[1])
            return [event for event in events if event[0] == kind]

        # A message that is read shows that the subscription stands.
        while not found("BlockStored"):
            body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1}}
            assert server.client.post("/generate", json=body).status_code == 200
            server.client.post("/flush_cache")
        _, hashes, parent, tokens, size, *_ = found("BlockStored")[0]
        assert (len(hashes), parent, tokens, size) == (2, None, IDS[:32], 16)
        until(lambda: found("AllBlocksCleared") and events[-1] == ["AllBlocksCleared"], 30)
    context.destroy(linger=0)
