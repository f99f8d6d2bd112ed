"""Host memory as the second tier of the prefix cache: it holds pages evicted from the device.

Each page has a key: a hash of its tokens, of all tokens before them and of the namespace. So pages
are found without a tree. Pages of earlier weights or of other adapters have other namespaces, so
they are never found.

A page is copied to host memory when the tree evicts it. The copy stays when the page is copied
back, so its next eviction copies nothing. When host memory is full, the least recently used pages
are dropped.

The plan of a step contains the copies that were decided before it. On a GPU, pages are copied back
while steps run. The copies of one plan have a number, called a ticket. A step that reads or
overwrites a page waits for the ticket of the copies of this page.

With a file tier, pages that arrive in host memory are also written to files (`FileTier`). Before a
request that begins with such pages is admitted, they are read from the files into host memory.

Source: the tiers are those of SGLang's HiCache; the keys are those of vLLM's prefix cache.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from runtime.cache.file_tier import Fetch, FileTier, Moved
from runtime.cache.page_files import KEY_BYTES
from runtime.cache.page_pool import PagePool, Pages
from runtime.step.step_plan import HostCopies, Int32Array

if TYPE_CHECKING:
    from runtime.cache.block_table import BlockTable

logger = logging.getLogger(__name__)

# Namespaces with these prefixes name something else after a restart: weights that were loaded while
# serving, and adapters, which get new numbers. No client's namespace has these prefixes.
WEIGHTS, ADAPTER = "weights ", "lora "
_FOR_FILES, _NOT_FOR_FILES = b"\1", b"\0"


def root_key(namespace: str) -> bytes:
    """Return the key that comes before the first page of a sequence.

    The last byte of each key says whether the page may be in a file.
    """
    is_lasting = not namespace.startswith((WEIGHTS, ADAPTER))
    end = _FOR_FILES if is_lasting else _NOT_FOR_FILES
    return hashlib.sha256(namespace.encode()).digest() + end


def _copies_are_done() -> int:
    return sys.maxsize


class HostTier:
    """Decides which pages are in host memory, and which copies the next plan carries.

    Attributes:
        pool: free host pages.
        page_size: tokens per page.
        num_loaded: pages that came back to the device so far.
        files: the files of pages; `None` for none.
        last_done: returns the ticket of the latest copies that are known to be done. On a CPU, the
            copies of a step are always done before the step.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Start without pages in use.

        Args:
            num_pages: pages in host memory.
            page_size: tokens per page, as on the device.
        """
        self.pool = PagePool(num_pages)
        self.num_loaded = 0
        self.files: FileTier | None = None
        self.last_done: Callable[[], int] = _copies_are_done
        self.page_size = page_size
        # Host page of each key, the longest unused first.
        self._held: dict[bytes, int] = {}
        # Keys of pages that are to be written to files, those that arrived first in front.
        self._unwritten: dict[bytes, None] = {}
        # Page, host page and direction (to the host) of each copy that the next plan carries.
        self._copies: list[tuple[int, int, bool]] = []
        self._ticket = self._needed = 0
        # Ticket of the latest copy from or to each host page.
        self._latest = [0] * (num_pages + 1)

    @property
    def num_held(self) -> int:
        """Number of host pages in use."""
        return len(self._held)

    def keys(self, tokens: Int32Array, before: bytes) -> Iterator[bytes]:
        """Yield the keys of the whole pages of `tokens`; `before` is the key of the page before."""
        data, size = tokens.tobytes(), self.page_size * tokens.itemsize
        for end in range(size, len(data) + 1, size):
            page = data[end - size : end]
            digest = hashlib.blake2b(page, digest_size=KEY_BYTES, key=before).digest()
            before = digest + before[-1:]
            yield before

    def find(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the longest beginning of `keys` whose pages are all in host memory."""
        return list(itertools.takewhile(self._held.__contains__, keys))

    def touch(self, keys: list[bytes]) -> None:
        """Note that consecutive pages were used, so that they are dropped last."""
        for key in reversed(keys):
            self._held[key] = self._held.pop(key)

    def save(self, keys: list[bytes], pages: Pages) -> None:
        """Copy evicted pages to host memory, except those that are there already.

        Args:
            keys: keys of consecutive pages of a sequence.
            pages: these pages on the device.
        """
        # The end of a sequence is useless without its beginning, so it makes room first.
        for key, page in zip(reversed(keys), reversed(pages.tolist()), strict=True):
            host_page = self._held.pop(key, 0)
            if not host_page:
                host_page = self._make_room()
                if not host_page:
                    continue
                # An earlier copy of that host page may still run.
                self._needed = max(self._needed, self._latest[host_page])
                self._add(page, host_page, to_host=True)
            self._held[key] = host_page
        files = self.files
        if files is not None and files.is_on and keys and keys[0].endswith(_FOR_FILES):
            missing = (key for key in keys if key in self._held and key not in files)
            self._unwritten.update(dict.fromkeys(missing))

    def _make_room(self, done: int = sys.maxsize, kept: Container[bytes] = ()) -> int:
        """Return a free host page, after dropping the least recently used page if necessary.

        Args:
            done: copies with tickets up to this one are done. Only a host page without later copies
                is returned.
            kept: keys of pages that are not dropped.

        Returns:
            The host page; 0 if there is none, because all others are being written to files.
        """
        if self.pool.num_free:
            pages = self.pool.take(1)
            if self._latest[int(pages[0])] <= done:
                return int(pages[0])
            self.pool.give_back(pages)
        busy: Container[int] = () if self.files is None else self.files.busy
        for key, host_page in self._held.items():
            if host_page not in busy and self._latest[host_page] <= done and key not in kept:
                del self._held[key]
                self._unwritten.pop(key, None)
                return host_page
        return 0

    def fetch(self, keys: list[bytes]) -> Fetch | None:
        """Start reading pages from files into host memory, up to the first page without a file.

        Args:
            keys: keys of consecutive pages of a sequence, which are not on the device.

        Returns:
            What the sequence's request waits for; `None` if there is nothing to wait for.
        """
        files = self.files
        if files is None:
            return None
        found = self.find(keys)
        self.touch(found)
        fetch, kept, done = Fetch(), frozenset(keys), self._num_done()
        for key in keys[len(found) :]:
            if key in self._held:
                continue
            if key not in files.reading:
                if not key.endswith(_FOR_FILES) or key not in files:
                    break
                host_page = self._make_room(done, kept)
                if not host_page:
                    break
                files.read(key, host_page)
            fetch.keys.append(key)
        return fetch if fetch.keys else None

    def is_waiting(self, fetch: Fetch | None) -> bool:
        """Whether a request should still wait for pages that are being read from files."""
        return fetch is not None and self.files is not None and self.files.is_waiting(fetch)

    @property
    def is_reading_files(self) -> bool:
        """Whether pages are being read from files."""
        return self.files is not None and bool(self.files.reading)

    def _num_done(self) -> int:
        """Return the ticket of the latest copies that were launched and are done."""
        return min(self.last_done(), self._ticket)

    def move_files(self) -> None:
        """Finish completed reads from files, and start to write pages that came to host memory."""
        files = self.files
        if files is None:
            return
        for moved in files.finished():
            self._take_over(moved)
        done = self._num_done() if self._unwritten else 0
        while self._unwritten and files.may_write:
            key = next(iter(self._unwritten))
            host_page = self._held[key]
            if self._latest[host_page] > done:
                break
            del self._unwritten[key]
            if host_page not in files.busy and files.is_on:
                files.write(key, host_page)

    def _take_over(self, moved: Moved) -> None:
        if moved.is_read and moved.succeeded and moved.key not in self._held:
            self._held[moved.key] = moved.host_page
        elif self._held.get(moved.key) != moved.host_page:
            self.pool.give_back(np.array([moved.host_page], dtype=np.int32))

    def stop_files(self) -> None:
        """Stop using files, because the weights change."""
        self._unwritten.clear()
        if self.files is not None and self.files.is_on:
            self.files.is_on = False
            logger.info("The weights change: files of the prefix cache are not used any more")

    def load(self, block_table: BlockTable, keys: list[bytes]) -> int:
        """Copy pages back to the device.

        Args:
            block_table: has the pages that the request shares with the prefix tree, and after them
                its own, which are filled.
            keys: keys of the first of the request's own pages.

        Returns:
            Number of pages that come back: fewer than `keys` if some have just been dropped from
            host memory.
        """
        found: list[int] = []
        for key in keys:
            host_page = self._held.get(key)
            if host_page is None:
                break
            found.append(host_page)
        if found:
            for page, host_page in zip(block_table.own().tolist(), found, strict=False):
                self._add(page, host_page, to_host=False)
            block_table.num_loaded, block_table.load_ticket = len(found), self._ticket + 1
            self.num_loaded += len(found)
        return len(found)

    def load_one(self, key: bytes, page: int) -> int:
        """Copy one page back to the device.

        Returns:
            The ticket of the copy, for `need`; 0 if the page is not in host memory.
        """
        host_page = self._held.get(key)
        if host_page is None:
            return 0
        self._add(page, host_page, to_host=False)
        self.num_loaded += 1
        return self._ticket + 1

    def need(self, ticket: int) -> None:
        """Let the next step wait for the copies with this ticket and with earlier tickets."""
        self._needed = max(self._needed, ticket)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget pages whose content may be wrong."""
        pages = [self._held.pop(key) for key in keys if key in self._held]
        self.pool.give_back(np.array(pages, dtype=np.int32))

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def _add(self, page: int, host_page: int, *, to_host: bool) -> None:
        self._copies.append((page, host_page, to_host))
        self._latest[host_page] = self._ticket + 1

    def is_loading(self, block_table: BlockTable) -> bool:
        """Whether a step with the table's request would have to wait for copies of its pages."""
        return block_table.load_ticket > self.last_done()

    def use(self, block_table: BlockTable) -> None:
        """Let the next step wait for the pages that are being copied back for a request.

        Called in two cases: the step computes the request, or the request releases its pages, which
        others may then use.
        """
        self._needed = max(self._needed, block_table.load_ticket)
        block_table.load_ticket = 0

    def take_copies(self) -> HostCopies | None:
        """Return the copies for the next plan (`StepPlan.host`), or `None` if there are none."""
        if not self._copies and not self._needed:
            return None
        self._ticket += bool(self._copies)
        table = np.array(self._copies, dtype=np.int32).reshape(-1, 3)
        pages, host_pages, to_host = np.ascontiguousarray(table.T)
        copies = HostCopies(self._ticket, self._needed, pages, host_pages, to_host.astype(bool))
        self._copies.clear()
        self._needed = 0
        return copies

    def clear(self) -> None:
        """Drop all pages in host memory; files stay.

        Copies that are still in flight do not bring a page back into the table.
        """
        self._held.clear()
        self._unwritten.clear()
        busy = [] if self.files is None else list(self.files.busy)
        self.pool.reset(np.array(busy, dtype=np.int32))

    def recover(self) -> None:
        """After an exception: drop all pages, and let the next step wait for all copies."""
        self.clear()
        self._needed = self._ticket + bool(self._copies)

    def check_invariants(self) -> None:
        """Assert that each host page is in exactly one place.

        Raises:
            AssertionError: a host page is lost or used twice.
        """
        held = self._held.values()
        moving = set() if self.files is None else set(self.files.busy).difference(held)
        pages = np.sort([*self.pool.free_pages().tolist(), *held, *moving])
        is_whole = np.array_equal(pages, np.arange(1, self.pool.num_pages + 1))
        assert is_whole, "host pages were lost or doubled"
