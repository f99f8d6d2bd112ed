"""Whoever applies the events of a prefix cache knows what it holds."""

from __future__ import annotations

import json
import random
import tempfile

import msgspec
import numpy as np
import pytest
import zmq

from runtime.cache.block_table import BlockTable
from runtime.cache.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventLog,
)
from runtime.cache.manager import CacheManager
from runtime.config.kv_events_config import KVEventsConfig, of_replica
from runtime.errors import StartupError
from runtime.ipc.kv_publisher import KVPublisher

PAGE = 2


class Index:
    """A router's view: blocks by hash, each with its parent and its tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {1: (None, (0, 0))}

    def apply(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    parent = event.parent_block_hash
                    assert parent is None or parent in self.blocks, "an orphan"
                    for at, block in enumerate(event.block_hashes):
                        assert block not in self.blocks, "stored twice"
                        tokens = event.token_ids[at * PAGE : (at + 1) * PAGE]
                        self.blocks[block] = parent, tuple(tokens)
                        parent = block
                case BlockRemoved():
                    for block in event.block_hashes:
                        del self.blocks[block]
                case AllBlocksCleared():
                    self.blocks.clear()

    def holds(self, tokens: list[int]) -> bool:
        """Whether the whole pages of `tokens` are cached, by following parents."""
        parent = None
        for at in range(0, len(tokens) - len(tokens) % PAGE, PAGE):
            block = tuple(tokens[at : at + PAGE])
            found = [key for key, value in self.blocks.items() if value == (parent, block)]
            if not found:
                return False
            (parent,) = found
        return True


def _manager(index: Index) -> CacheManager:
    manager = CacheManager(12, PAGE)
    manager.tree.events = KVEventLog(PAGE, 0, index.apply)
    return manager


def test_an_index_follows_random_requests() -> None:
    index, draw = Index(), random.Random(5)
    manager = _manager(index)
    seen: list[list[int]] = []
    num_evicted = 0
    for _ in range(300):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(2, 12))]
        keys = np.array(tokens, dtype=np.int32)
        table = BlockTable()
        manager.attach_prefix(table, keys, "")
        assert manager.extend(table, len(tokens))
        manager.release(table, keys, "")
        if draw.random() < 0.05:
            manager.flush()
        manager.publish_events()
        seen.append(tokens)
        assert len(index.blocks) == manager.tree.num_pages
        for each in seen[-20:]:
            whole = len(each) // PAGE
            cached = manager.match_length(np.array(each, dtype=np.int32), "") // PAGE
            assert index.holds(each) == (cached == whole)
            num_evicted += cached < whole
    # Both outcomes were seen.
    assert num_evicted > 100


def test_name_spaces_and_places_have_hashes_of_their_own() -> None:
    log = KVEventLog(PAGE, 0, lambda batch: None)
    tokens = np.array([1, 2, 1, 2], dtype=np.int32)
    plain, other = log.stored(tokens, None, ""), log.stored(tokens, None, "x" * 100)
    assert len({*plain, *other}) == 4
    assert log.stored(tokens[2:], plain[0], "") == plain[1:]


def test_subscribers_get_batches_and_those_that_they_missed() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # A short path, as sockets need.
    folder = f"ipc://{tempfile.mkdtemp()}/events"
    config = KVEventsConfig(
        endpoint=f"{folder}-a", replay_endpoint=f"{folder}-b", topic="kv", buffer_steps=3
    )
    publisher = KVPublisher(context, config, 1)
    reader, asker = context.socket(zmq.SUB), context.socket(zmq.REQ)
    reader.connect(of_replica(f"{folder}-a", 1))
    reader.setsockopt(zmq.SUBSCRIBE, b"kv")
    asker.connect(of_replica(f"{folder}-b", 1))
    batch = KVEventBatch(1.5, [BlockStored([7], None, [1, 2], PAGE)], 1)
    # A subscriber that has just come may miss some.
    num_published = 0
    while not reader.poll(20):
        publisher.publish(batch)
        num_published += 1
    topic, number, payload = reader.recv_multipart()
    assert topic == b"kv"
    # vLLM's and SGLang's form: arrays, each event with its name first.
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [["BlockStored", [7], None, [1, 2], PAGE, None, "GPU"]],
        1,
    ]
    for _ in range(4):
        publisher.publish(batch)
    first = int.from_bytes(number, "big")
    num_published += 4
    for wanted in range(first + 1, num_published):
        assert int.from_bytes(reader.recv_multipart()[1], "big") == wanted
    missed = num_published - 2
    asker.send(missed.to_bytes(8, "big"))
    found = [int.from_bytes(asker.recv_multipart()[0], "big")]
    assert found == [missed]
    publisher.close()
    context.destroy(linger=0)


def test_a_subscriber_that_reads_slowly_gets_every_batch_again() -> None:
    """More than a socket holds by default, twice in a row."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    folder = f"ipc://{tempfile.mkdtemp()}/events"
    count = 2500
    config = KVEventsConfig(
        endpoint=f"{folder}-a", replay_endpoint=f"{folder}-b", buffer_steps=count
    )
    publisher = KVPublisher(context, config, 0)
    reader, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    reader.setsockopt(zmq.RCVHWM, 0)
    asker.setsockopt(zmq.RCVHWM, 1)
    reader.connect(config.endpoint)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    asker.connect(f"{folder}-b")
    batch = KVEventBatch(1.5, [BlockStored([7], None, [2**20] * 250, 250)], 0)
    for _ in range(count):
        publisher.publish(batch)
    number = -1
    while number < count - 1:
        assert reader.poll(60_000)
        number = int.from_bytes(reader.recv_multipart()[1], "big")
    for _ in range(2):
        asker.send_multipart([b"", (0).to_bytes(8, "big")])
    for wanted in [*range(count), -1] * 2:
        assert asker.poll(60_000), f"batch {wanted} was dropped"
        found = int.from_bytes(asker.recv_multipart()[1], "big", signed=True)
        assert found == wanted
    publisher.close()
    context.destroy(linger=0)


def _first_of_a_late_subscriber() -> int:
    """The first number that a subscriber gets that connects after the first batch was made."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    folder = f"ipc://{tempfile.mkdtemp()}/events"
    config = KVEventsConfig(endpoint=f"{folder}-a", replay_endpoint=f"{folder}-b")
    publisher = KVPublisher(context, config, 0)
    batch = KVEventBatch(1.5, [AllBlocksCleared()], 0)
    publisher.publish(batch)
    asker, reader = context.socket(zmq.REQ), context.socket(zmq.SUB)
    asker.connect(f"{folder}-b")
    asker.send((0).to_bytes(8, "big"))
    assert asker.poll(60_000)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    reader.connect(config.endpoint)
    while not reader.poll(20):
        publisher.publish(batch)
    number = int.from_bytes(reader.recv_multipart()[1], "big")
    publisher.close()
    context.destroy(linger=0)
    return number


def test_subscribers_that_connect_again_learn_that_the_cache_is_empty() -> None:
    # A busy machine may not connect within the second that batches are held.
    assert any(_first_of_a_late_subscriber() == 0 for _ in range(10))


@pytest.mark.parametrize(
    ("endpoint", "replay", "why"),
    [
        ("tcp://*:65534", "tcp://*:5557", r"ports in \[1, 65533\] with --dp-size 3"),
        ("tcp://*:5557", "tcp://*:65535", "replay_endpoint must be"),
        ("tcp://*:5557", "tcp://*:5559", r"share tcp://\*:5559: with --dp-size 3 copy N adds N"),
        ("tcp://10.0.0.1:5559", "tcp://*:5557", r"share tcp://\*:5559"),
        ("ipc:///x", "ipc:///x.2", "share ipc:///x.2"),
    ],
)
def test_endpoints_of_copies_lie_apart(endpoint: str, replay: str, why: str) -> None:
    text = json.dumps({"endpoint": endpoint, "replay_endpoint": replay})
    with pytest.raises(StartupError, match=why):
        KVEventsConfig.parse(text, 3)


def test_endpoints_of_copies_may_share_a_port_of_different_addresses() -> None:
    for endpoint, replay in (
        ("tcp://*:5557", "tcp://*:6557"),
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.2:5557"),
        ("tcp://*:65533", "ipc:///x"),
    ):
        text = json.dumps({"endpoint": endpoint, "replay_endpoint": replay})
        assert KVEventsConfig.parse(text, 3) is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "object"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"topics": ""}', "topics"),
        ('{"endpoint": "http://x"}', "tcp://HOST:PORT"),
        ('{"endpoint": "tcp://*:70000"}', "tcp://HOST:PORT"),
        ('{"endpoint": "tcp://*:0"}', "tcp://HOST:PORT"),
        ('{"replay_endpoint": "tcp://*:5557"}', "share"),
        ('{"buffer_steps": 0}', "buffer_steps"),
    ],
)
def test_a_wrong_option_is_one_line(text: str, why: str) -> None:
    with pytest.raises(StartupError, match=why):
        KVEventsConfig.parse(text)


def test_the_option_of_the_reference_is_read() -> None:
    text = '{"publisher": "zmq", "topic": "kv-events", "endpoint": "tcp://*:5557"}'
    found = KVEventsConfig.parse(text)
    assert found is not None
    assert of_replica(found.endpoint, 2) == "tcp://*:5559"
    assert KVEventsConfig.parse('{"publisher": "null"}') is None
    assert KVEventsConfig.parse('{"enable_kv_cache_events": false}') is None
