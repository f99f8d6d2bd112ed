"""The free pages of the KV cache, as a stack of int32 page numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]
EMPTY_PAGES: Pages = np.empty(0, dtype=np.int32)


class PagePool:
    """Keeps the free pages among pages 1 to `num_pages`; page 0 is reserved for padding."""

    def __init__(self, num_pages: int) -> None:
        """Create a pool in which all `num_pages` pages are free."""
        self.num_pages = num_pages
        # The highest numbers are at the bottom, so pages are taken in ascending order.
        self._stack: Pages = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return self._num_free

    def take(self, count: int) -> Pages:
        """Remove `count` free pages from the pool and return them; that many must be free."""
        assert 0 <= count <= self._num_free, "the pool has too few free pages"
        end = self._num_free
        self._num_free = end - count
        return self._stack[end - count : end][::-1].copy()

    def give_back(self, pages: Pages) -> None:
        """Return pages that were taken from the pool."""
        count = len(pages)
        assert self._num_free + count <= self.num_pages, "a page was given back twice"
        self._stack[self._num_free : self._num_free + count] = pages[::-1]
        self._num_free += count

    def reset(self, taken: Pages) -> None:
        """Make all pages free, except `taken`."""
        is_free = np.ones(self.num_pages + 1, dtype=bool)
        is_free[0] = False
        is_free[taken] = False
        free = np.flatnonzero(is_free)
        self._num_free = len(free)
        self._stack[: len(free)] = free[::-1]

    def free_pages(self) -> Pages:
        """Return the numbers of all free pages, as a copy."""
        return self._stack[: self._num_free].copy()
