"""Events of the prefix cache: which blocks of tokens were stored and which were removed.

A block is a page. Its hash covers all tokens before it and the name space, so equal hashes mean
equal prefixes.

Source: the messages of vLLM (`vllm/distributed/kv_events.py`) and SGLang, in the form of arrays.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

MEDIUM = "GPU"
# Positive in 64 bits with a sign, as some subscribers read them.
_MASK = 2**63 - 1


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class BlockStored(_Event, frozen=True):
    """Blocks were stored, one behind the other.

    Attributes:
        parent_block_hash: hash of the block before the first one; `None` at the beginning of a
            sequence.
        token_ids: token ids of all blocks, `block_size` ids for each block.
        lora_id: always `None`; adapters have name spaces of their own.
        medium: the kind of memory that holds the blocks.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM


class BlockRemoved(_Event, frozen=True):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(_Event, frozen=True):
    """No block is cached any more."""


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The events of one step.

    Attributes:
        ts: seconds since 1970.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEventLog:
    """Collects the events of a tree until they are published.

    The tree of a new worker is empty, so the first event clears what subscribers remember.
    """

    def __init__(
        self, page_size: int, dp_rank: int, publish: Callable[[KVEventBatch], None]
    ) -> None:
        """Collect for `publish`; nothing is published before `flush`."""
        self._page_size, self._dp_rank, self._publish = page_size, dp_rank, publish
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()]

    def stored(self, tokens: NDArray[np.int32], parent: int | None, namespace: str) -> list[int]:
        """Note that the whole pages of `tokens` were stored, and return their hashes.

        Args:
            tokens: tokens of the stored pages, `[num_pages * page_size]`.
            parent: hash of the page before the first one.
            namespace: name space of the sequence.
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
        """Note that blocks were evicted."""
        if hashes:
            self._events.append(BlockRemoved(hashes))

    def cleared(self) -> None:
        """Note that no block is left."""
        self._events = [AllBlocksCleared()]

    def flush(self) -> None:
        """Publish what was collected, if anything."""
        if self._events:
            events, self._events = self._events, []
            self._publish(KVEventBatch(time.time(), events, self._dp_rank))


def _key(seed: bytes) -> bytes:
    return seed if len(seed) <= hashlib.blake2b.MAX_KEY_SIZE else hashlib.sha256(seed).digest()
