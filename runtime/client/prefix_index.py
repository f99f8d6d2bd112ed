"""Which prefixes a replica's cache probably holds: hashes of what was sent there, bounded.

It is an estimate for routing only: a wrong one costs recomputing a prompt. So hashes may collide,
and the replica does not report evictions. The index evicts by the same rule as the replica, least
recently used first, once it covers as many tokens as the replica's pool holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from runtime.requests.image_input import ImageInput

_BYTES_PER_ID = 4
# Fine at the start, where short prompts differ; coarse after it, so that hashing 100,000 tokens is
# cheap.
_FINE_BLOCK, _NUM_FINE, _COARSE_BLOCK = 16, 32, 128
# 64 Ki entries or less: about 8 MB.
MAX_TOKENS = 1 << 20


def block_len(index: int) -> int:
    """Tokens of a prompt's block number `index`."""
    return _FINE_BLOCK if index < _NUM_FINE else _COARSE_BLOCK


def prefix_hashes(input_ids: bytes, namespace: str, images: Sequence[ImageInput] = ()) -> list[int]:
    """A hash for each whole block of a prompt, over everything up to the block's end.

    Args:
        input_ids: int32 bytes. The last token is not hashed: it is always computed.
        namespace: prompts of different namespaces share no hash.
        images: of the prompt; hashed because the placeholder tokens of all images are equal.
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
    """Token ids with each image's digest written over its placeholders, cut to their length."""
    known = bytearray(input_ids)
    for each in images:
        start = _BYTES_PER_ID * each.start
        digest = each.image.digest[: _BYTES_PER_ID * each.image.num_tokens]
        known[start : start + len(digest)] = digest
    return bytes(known)


class PrefixIndex:
    """The prefixes that were sent to one replica."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        """Cover at most `max_tokens`."""
        self.max_tokens = max_tokens
        self._num_tokens = 0
        self._blocks: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def matched_tokens(self, hashes: list[int]) -> int:
        """Tokens at the start of the prompt of these `hashes` that the replica probably holds."""
        matched = 0
        for value in hashes:
            size = self._blocks.get(value)
            if size is None:
                break
            matched += size
        return matched

    def add(self, hashes: list[int]) -> None:
        """Add a prompt that was sent, and evict the least recently used ends of prompts."""
        # The start is added last, as the most recent: ends are evicted before it.
        for index in range(len(hashes) - 1, -1, -1):
            value = hashes[index]
            self._num_tokens -= self._blocks.pop(value, 0)
            self._blocks[value] = size = block_len(index)
            self._num_tokens += size
        while self._num_tokens > self.max_tokens and self._blocks:
            self._num_tokens -= self._blocks.popitem(last=False)[1]

    def clear(self) -> None:
        """Forget everything: the replica's cache was dropped."""
        self._blocks.clear()
        self._num_tokens = 0
