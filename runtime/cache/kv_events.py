"""Events of the prefix cache: which blocks of tokens were stored, and which were removed.

A block is a page of the KV cache. Its hash covers the block's tokens, all tokens before it and the
namespace. So blocks with equal hashes have equal prefixes.

Source: the events of vLLM (`vllm/distributed/kv_events.py`) and SGLang, encoded as arrays.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

MEDIUM = "GPU"
# Hashes have 63 bits, because some subscribers read them as signed 64-bit integers.
_MASK = 2**63 - 1


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class BlockStored(_Event, frozen=True):
    """Consecutive blocks of a sequence were stored in the prefix cache.

    Attributes:
        block_hashes: hash of each block.
        parent_block_hash: hash of the block before the first one; `None` at the beginning of a
            sequence.
        token_ids: token ids of all blocks, `block_size` ids for each block.
        block_size: number of tokens per block.
        lora_id: always `None`; prefixes of LoRA adapters differ in their namespace.
        medium: the kind of memory that holds the blocks.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM


class BlockRemoved(_Event, frozen=True):
    """Blocks with these hashes were removed from the prefix cache."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(_Event, frozen=True):
    """All blocks were removed from the prefix cache."""


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The events of one step.

    Attributes:
        ts: time of the step, seconds since 1970.
        events: the events in order.
        data_parallel_rank: index of the replica.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEventLog:
    """Collects the events of a prefix tree until they are published.

    The tree of a new worker is empty. So the first event tells subscribers to forget all blocks.
    """

    def __init__(
        self, page_size: int, dp_rank: int, publish: Callable[[KVEventBatch], None]
    ) -> None:
        """Collect events and pass them to `publish` when `flush` is called.

        Args:
            page_size: number of tokens per page.
            dp_rank: index of the replica.
            publish: sends a batch of events to the subscribers.
        """
        self._page_size, self._dp_rank, self._publish = page_size, dp_rank, publish
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()]

    def stored(self, tokens: NDArray[np.int32], parent: int | None, namespace: str) -> list[int]:
        """Add the event that pages were stored, and return the pages' hashes.

        Args:
            tokens: `[num_pages * page_size]` int32, tokens of the stored pages.
            parent: hash of the page before the first one; `None` at the beginning of a sequence.
            namespace: the sequence's namespace in the prefix cache.
        """
        hashes, before = [], parent
        for start in range(0, len(tokens), self._page_size):
            seed = namespace.encode() if before is None else before.to_bytes(8, "big")
            block = tokens[start : start + self._page_size].tobytes()
            digest = hashlib.blake2b(block, digest_size=8, key=_key(seed)).digest()
            before = int.from_bytes(digest, "big") & _MASK
            hashes.append(before)
        self._events.append(BlockStored(hashes, parent, tokens.tolist(), self._page_size))
        return hashes

    def removed(self, hashes: list[int]) -> None:
        """Add the event that the pages with these hashes were removed."""
        if hashes:
            self._events.append(BlockRemoved(hashes))

    def cleared(self) -> None:
        """Add the event that all pages were removed, which replaces all events before it."""
        self._events = [AllBlocksCleared()]

    def flush(self) -> None:
        """Publish the collected events, if there are any, and forget them."""
        if self._events:
            events, self._events = self._events, []
            self._publish(KVEventBatch(time.time(), events, self._dp_rank))


def _key(seed: bytes) -> bytes:
    return seed if len(seed) <= hashlib.blake2b.MAX_KEY_SIZE else hashlib.sha256(seed).digest()
