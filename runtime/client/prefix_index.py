"""Estimates which prefixes a replica has cached, from hashes of the prompts that were sent there.

The estimate is used only for routing. If it is wrong, a prompt is computed again, so collisions of
hashes are harmless and the replica need not report evictions. The index evicts by the same rule as
the replica, least recently used first, once it covers as many tokens as the replica's KV pool
holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from runtime.requests.image_input import ImageInput

_BYTES_PER_ID = 4
# Tokens of a block at the start of a prompt, where short prompts differ; number of such blocks; and
# tokens of every later block. Large blocks make hashing 100,000 tokens cheap.
_FINE_BLOCK, _NUM_FINE, _COARSE_BLOCK = 16, 32, 128
# The most tokens of an index. It then has at most 64 Ki entries, about 8 MB.
MAX_TOKENS = 1 << 20


def block_len(index: int) -> int:
    """Return the number of tokens of block `index` of a prompt."""
    return _FINE_BLOCK if index < _NUM_FINE else _COARSE_BLOCK


def prefix_hashes(input_ids: bytes, namespace: str, images: Sequence[ImageInput] = ()) -> list[int]:
    """Return a hash for each whole block of a prompt, over all tokens up to the block's end.

    Args:
        input_ids: int32 bytes. The last token is left out, because it is always computed.
        namespace: namespace of the prefix cache; prompts of different namespaces share no hash.
        images: the prompt's images. Their digests replace their placeholder tokens, which are the
            same for all images.
    """
    if images:
        input_ids = _with_digests(input_ids, images)
    end = len(input_ids) - _BYTES_PER_ID
    value, hashes = hash(namespace), []
    start, stop = 0, _BYTES_PER_ID * block_len(0)
    while stop <= end:
        value = hash((value, input_ids[start:stop]))
        hashes.append(value)
        start, stop = stop, stop + _BYTES_PER_ID * block_len(len(hashes))
    return hashes


def _with_digests(input_ids: bytes, images: Sequence[ImageInput]) -> bytes:
    """Return token ids in which each image's digest, cut to length, replaces its placeholders."""
    known = bytearray(input_ids)
    for each in images:
        start = _BYTES_PER_ID * each.start
        digest = each.image.digest[: _BYTES_PER_ID * each.image.num_tokens]
        known[start : start + len(digest)] = digest
    return bytes(known)


class PrefixIndex:
    """Estimate of the prefixes that one replica has cached."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        """Start empty; cover at most `max_tokens` tokens."""
        self.max_tokens = max_tokens
        self._num_tokens = 0
        self._blocks: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def matched_tokens(self, hashes: list[int]) -> int:
        """Return how many tokens at the start of a prompt are probably cached.

        Args:
            hashes: the prompt's hashes, from `prefix_hashes`.
        """
        matched = 0
        for value in hashes:
            size = self._blocks.get(value)
            if size is None:
                break
            matched += size
        return matched

    def add(self, hashes: list[int]) -> None:
        """Add a prompt that was sent; evict the least recently used blocks if there are too many.

        Args:
            hashes: the prompt's hashes, from `prefix_hashes`.
        """
        # The first block is added last, as the most recently used, so that blocks at the ends of
        # prompts are evicted before the blocks that they continue.
        for index in range(len(hashes) - 1, -1, -1):
            value = hashes[index]
            self._num_tokens -= self._blocks.pop(value, 0)
            self._blocks[value] = size = block_len(index)
            self._num_tokens += size
        while self._num_tokens > self.max_tokens and self._blocks:
            self._num_tokens -= self._blocks.popitem(last=False)[1]

    def clear(self) -> None:
        """Forget all prefixes, because the replica's cache was dropped."""
        self._blocks.clear()
        self._num_tokens = 0
