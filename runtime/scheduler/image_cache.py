"""Decides which images' vectors stay in device memory; every rank follows these decisions."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import blake2b

import numpy as np

from runtime.cache.radix_tree import Tokens
from runtime.requests.image_input import ImageInput, PreparedImage

# The key is secret, so that a client cannot search for two images with equal hashes.
_SECRET = secrets.token_bytes(16)
# The bit that makes an image's keys negative: token ids are never negative.
_SIGN = np.int32(-(2**31))


def cache_keys(tokens: Tokens, images: Sequence[ImageInput]) -> Tokens:
    """Return the keys by which the prefix cache finds a prompt.

    The keys are the token ids, except at the positions of images, which get a hash of the image. So
    two prompts with equal text but different images share no page that holds a part of an image.

    Args:
        tokens: token ids of the prompt.
        images: the prompt's images, with their positions.

    Returns:
        `tokens` itself if there are no images, else a new array.
    """
    if not images:
        return tokens
    keys = tokens.copy()
    for image in images:
        hashed = blake2b(image.image.digest, digest_size=16, key=_SECRET).digest()
        numbers = np.frombuffer(hashed, dtype=np.int32) | _SIGN
        span = keys[image.start : image.start + image.image.num_tokens]
        span[:] = np.resize(numbers, len(span))
    return keys


class ImageCache:
    """The images whose vectors are in device memory, the least recently used first.

    Attributes:
        step_tokens: most prompt tokens of a step, if the model must compute an image's tokens in
            one step; `None` if a step may end within an image.
        num_computed: number of images whose vectors the vision tower has computed.
        num_hits: number of images of prompts whose vectors were already on the device.
    """

    def __init__(
        self, capacity_bytes: int, bytes_per_token: int, step_tokens: int | None = None
    ) -> None:
        """Keep at most `capacity_bytes` of vectors; a step may need more for its own images.

        `bytes_per_token` is the size of one vector; an image has one vector per token.
        """
        self.step_tokens = step_tokens
        self._capacity = capacity_bytes
        self._per_token = bytes_per_token
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._used = 0
        # Images that are no longer kept here; the next plan tells the executor to drop them.
        self._drops: set[bytes] = set()
        # Images that were computed for a later step, which has not read them yet.
        self._unread: set[bytes] = set()
        # Images that were computed for a later step, in a step that failed. The step that reads
        # them computes them again, so that a second failure ends only the request they belong to.
        self._failed_ahead: set[bytes] = set()
        self.num_computed = 0
        self.num_hits = 0

    @property
    def size_bytes(self) -> int:
        """The bytes of all kept vectors."""
        return self._used

    def __contains__(self, digest: object) -> bool:
        return digest in self._kept

    def may_go_ahead(self, digest: bytes) -> bool:
        """Whether an image may be computed before the step that reads its vectors."""
        return digest not in self._failed_ahead

    def count_read(self, digest: bytes) -> None:
        """Count that a prompt begins to read an image's vectors.

        This counts as a hit, unless the image was computed for this prompt.
        """
        self.num_hits += digest in self._kept and digest not in self._unread
        self._unread.discard(digest)

    def plan(
        self, touched: Sequence[PreparedImage], ahead: Sequence[PreparedImage] = ()
    ) -> tuple[list[bytes], list[PreparedImage]]:
        """Decide which images a step drops and which it computes; record both as done already.

        Args:
            touched: images that the step needs, perhaps repeated. None of them is dropped: a prompt
                chunk may end within an image, and the next step then reads the image again.
            ahead: the images of `touched` that only a later step reads.

        Returns:
            The digests of the images to drop, and the images to compute.
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
        """Drop images whose vectors may be wrong or missing."""
        for digest in digests:
            self._used -= self._kept.pop(digest, 0)
            self._drops.add(digest)
            self._unread.discard(digest)

    def forget_failed(self, loads: Sequence[PreparedImage]) -> None:
        """Drop the images that a failed step was to compute."""
        digests = {image.digest for image in loads}
        self._failed_ahead = digests & self._unread
        self.forget(digests)

    def clear(self) -> None:
        """Drop all images, because the weights that computed them may have changed."""
        self.forget(list(self._kept))
