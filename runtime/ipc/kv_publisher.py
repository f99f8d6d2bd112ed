"""Publishes events of the prefix cache over ZMQ, and repeats events that subscribers missed.

Each message has three frames: the topic, a number that grows by one from message to message (8
bytes, big-endian), and the batch of events in msgpack. A subscriber that misses a number sends it
to a second socket. From there it receives all kept batches from this number on, and then a message
with the number -1.

Source: vLLM's `ZmqEventPublisher`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from runtime.config.kv_events_config import KVEventsConfig, of_replica
from runtime.errors import StartupError

logger = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_REQUEST_FRAMES = 3
_NUMBER_BYTES = 8
# Time after the start in which batches are held back, seconds. Subscribers of an earlier worker
# connect again within this time. They would lose the first batch, which says that the cache is
# empty, if it were sent at once.
_HOLD_S = 1.0
_encoder = msgspec.msgpack.Encoder()


class KVPublisher:
    """Publishes batches of events; the scheduler's thread calls it, another thread has the sockets.

    A slow subscriber loses batches, and never delays a step.
    """

    def __init__(self, context: zmq.Context[Any], config: KVEventsConfig, dp_rank: int) -> None:
        """Bind the sockets, and start the thread.

        Args:
            context: the ZMQ context of the sockets.
            config: the settings of `--kv-events-config`.
            dp_rank: index of the replica, which is added to the ports.

        Raises:
            StartupError: an endpoint cannot be bound; the message is one line.
        """
        self._topic = config.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._publisher = context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, config.hwm)
        _bind(self._publisher, of_replica(config.endpoint, dp_rank))
        self._requests = context.socket(zmq.ROUTER)
        # A ROUTER socket silently drops messages beyond its limit. ZMQ updates its count of read
        # messages in steps of half the limit, so the limit is that of two complete answers.
        self._requests.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
        if config.replay_endpoint is not None:
            _bind(self._requests, of_replica(config.replay_endpoint, dp_rank))
        # The queue between the threads has no limit, so that no batch is lost there.
        address = f"inproc://kv-events-{id(self)}"
        self._arrivals, self._send = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (self._arrivals, self._send):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self._arrivals.bind(address)
        self._send.connect(address)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: msgspec.Struct) -> None:
        """Queue a batch of events; never blocks."""
        with contextlib.suppress(zmq.Again):
            self._send.send(_encoder.encode(batch), zmq.NOBLOCK)

    def close(self) -> None:
        """Send the queued batches, and close the sockets."""
        self._send.send(b"")
        self._thread.join()
        for socket in (self._send, self._arrivals, self._publisher, self._requests):
            socket.close(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._arrivals, zmq.POLLIN)
        poller.register(self._requests, zmq.POLLIN)
        next_number = 0
        held: list[tuple[bytes, bytes]] | None = []
        until = time.monotonic() + _HOLD_S
        while True:
            left_s = max(0.0, until - time.monotonic())
            waiting = dict(poller.poll(None if held is None else 1 + int(left_s * 1000)))
            ends = False
            if self._arrivals in waiting:
                payload = self._arrivals.recv()
                ends = not payload
                if not ends:
                    number = next_number.to_bytes(_NUMBER_BYTES, "big")
                    next_number += 1
                    self._kept.append((number, payload))
                    if held is None:
                        self._publisher.send_multipart((self._topic, number, payload))
                    else:
                        held.append((number, payload))
            if held is not None and (ends or time.monotonic() >= until):
                for batch in held:
                    self._publisher.send_multipart((self._topic, *batch))
                held = None
            if ends:
                return
            if self._requests in waiting:
                self._replay(self._requests.recv_multipart())

    def _replay(self, frames: list[bytes]) -> None:
        if len(frames) != _REQUEST_FRAMES or len(frames[2]) != _NUMBER_BYTES:
            logger.warning("Ignored a request for past KV events of %d frames", len(frames))
            return
        peer, empty, first = frames
        for number, payload in [*((n, p) for n, p in self._kept if n >= first), (_END, b"")]:
            with contextlib.suppress(zmq.Again):
                self._requests.send_multipart((peer, empty, number, payload), zmq.NOBLOCK)


def _bind(socket: Any, endpoint: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise StartupError(
            f"--kv-events-config: {endpoint} cannot be bound: {error.strerror}."
        ) from None
