"""Whoever applies the events of a prefix cache knows what it holds."""

from __future__ import annotations

import random
import tempfile

import msgspec
import numpy as np
import pytest
import zmq

from runtime.cache.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventLog,
)
from runtime.cache.manager import BlockTable, CacheManager
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
    # A subscriber that has just come misses some.
    while not reader.poll(20):
        publisher.publish(batch)
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
    for wanted in range(first + 1, first + 5):
        assert int.from_bytes(reader.recv_multipart()[1], "big") == wanted
    asker.send((first + 3).to_bytes(8, "big"))
    found = [int.from_bytes(asker.recv_multipart()[0], "big")]
    assert found == [first + 3]
    publisher.close()
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "object"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"topics": ""}', "topics"),
        ('{"endpoint": "http://x"}', "tcp://HOST:PORT"),
        ('{"endpoint": "tcp://*:70000"}', "tcp://HOST:PORT"),
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
