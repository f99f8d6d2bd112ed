"""Which images' vectors the executor keeps: decided here, carried out by every rank."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import blake2b

import numpy as np

from runtime.cache.radix_tree import Tokens
from runtime.requests.image_input import ImageInput, PreparedImage

# Of this process: nobody outside can look for two images with the same numbers.
_SECRET = secrets.token_bytes(16)
# No token's id is negative.
_SIGN = np.int32(-(2**31))


def cache_keys(tokens: Tokens, images: Sequence[ImageInput]) -> Tokens:
    """What a prompt is known by in the prefix cache: `tokens`, with numbers in place of images.

    Equal text about different images shares no page that holds a part of one.

    Args:
        tokens: of the prompt.
        images: at their places in it.

    Returns:
        `tokens` itself where there are no images, else a new array.
    """
    if not images:
        return tokens
    keys = tokens.copy()
    for image in images:
        hashed = blake2b(image.image.digest, digest_size=16, key=_SECRET).digest()
        numbers = np.frombuffer(hashed, dtype=np.int32) | _SIGN
        place = keys[image.start : image.start + image.image.num_tokens]
        place[:] = np.resize(numbers, len(place))
    return keys


class ImageCache:
    """Images whose vectors are kept, the least recently used first.

    Attributes:
        step_tokens: prompt tokens of a step at most, where a step that computes tokens of an image
            computes all that are left of them; `None` where it may stop among them.
        num_computed: images that were given to the tower.
        num_hits: images of prompts whose vectors were there already.
    """

    def __init__(
        self, capacity_bytes: int, bytes_per_token: int, step_tokens: int | None = None
    ) -> None:
        """Keep at most `capacity_bytes`, beyond what steps need at one time."""
        self.step_tokens = step_tokens
        self._capacity = capacity_bytes
        self._per_token = bytes_per_token
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._used = 0
        # What the executor still has though it is not wanted any more.
        self._drops: set[bytes] = set()
        # Computed for a step that has not read them yet.
        self._unread: set[bytes] = set()
        # A step that computed these ahead failed: the step that reads them computes them, so that
        # the failure is that of their request.
        self._failed_ahead: set[bytes] = set()
        self.num_computed = 0
        self.num_hits = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all vectors that are kept."""
        return self._used

    def __contains__(self, digest: object) -> bool:
        return digest in self._kept

    def may_go_ahead(self, digest: bytes) -> bool:
        """Whether an image may be computed ahead of the step that reads it."""
        return digest not in self._failed_ahead

    def count_read(self, digest: bytes) -> None:
        """A prompt begins to read an image: a hit, unless it was computed for that."""
        self.num_hits += digest in self._kept and digest not in self._unread
        self._unread.discard(digest)

    def plan(
        self, touched: Sequence[PreparedImage], ahead: Sequence[PreparedImage] = ()
    ) -> tuple[list[bytes], list[PreparedImage]]:
        """Decide for one step; what is decided is taken as done.

        Args:
            touched: images that the step reads, perhaps several times; none of them is dropped. A
                prompt that is cut within an image goes on with the next step, which reads it again.
            ahead: those of them that only a later step reads.

        Returns:
            Digests to drop, and images to compute.
        """
        loads: dict[bytes, PreparedImage] = {}
        for image in touched:
            if image.digest in self._kept:
                self._kept.move_to_end(image.digest)
            else:
                loads.setdefault(image.digest, image)
        for digest, image in loads.items():
            self._kept[digest] = image.num_tokens * self._per_token
            self._used += self._kept[digest]
        self.num_computed += len(loads)
        self._unread.update(image.digest for image in ahead)
        if self._used > self._capacity:
            self._shrink({image.digest for image in touched})
        drops, self._drops = self._drops, set()
        return sorted(drops), list(loads.values())

    def _shrink(self, needed: Collection[bytes]) -> None:
        for digest in [digest for digest in self._kept if digest not in needed]:
            self.forget([digest])
            if self._used <= self._capacity:
                return

    def forget(self, digests: Collection[bytes]) -> None:
        """Keep these no longer: they may not be what they should, or not be there."""
        for digest in digests:
            self._used -= self._kept.pop(digest, 0)
            self._drops.add(digest)
            self._unread.discard(digest)

    def forget_failed(self, loads: Sequence[PreparedImage]) -> None:
        """Forget what a step that failed was to compute."""
        digests = {image.digest for image in loads}
        self._failed_ahead = digests & self._unread
        self.forget(digests)

    def clear(self) -> None:
        """Keep none: the weights that made them have changed."""
        self.forget(list(self._kept))
