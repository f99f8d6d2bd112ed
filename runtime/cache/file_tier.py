"""Files as the third tier of the prefix cache: threads copy pages between host memory and files.

The scheduler never waits for a disk. It only says which page of host memory (host page) is to be
written or filled, and later asks which pages are done. Until then the host page is busy: nothing
else may write to it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

from runtime.cache.page_files import KEY_BYTES, PageFiles

logger = logging.getLogger(__name__)

# One thread writes. Several read, because requests wait for them.
_NUM_READERS = 4
# The most host pages that wait for a disk at a time. They cannot be evicted meanwhile.
_MOST_WRITES = 64
# After this many seconds, a request continues without the pages that were not read yet.
_MOST_WAIT_S = 5.0


class _Job(NamedTuple):
    key: bytes
    host_page: int
    is_read: bool


class Moved(NamedTuple):
    """The result of writing or reading a page.

    Attributes:
        key: key of the page.
        host_page: its host page, which is no longer busy.
        is_read: whether the host page was filled.
        succeeded: whether the file was written, or the host page filled, completely.
    """

    key: bytes
    host_page: int
    is_read: bool
    succeeded: bool


class Fetch:
    """The pages that are read for a waiting request."""

    __slots__ = ("keys", "until")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.until = time.monotonic() + _MOST_WAIT_S


_Jobs = queue.SimpleQueue[_Job | None]
_Results = queue.SimpleQueue[Moved]


def _work(
    jobs: _Jobs, results: _Results, files: PageFiles, page_bytes: Callable[[int], memoryview]
) -> None:
    while (job := jobs.get()) is not None:
        succeeded = False
        try:
            work = files.read if job.is_read else files.write
            succeeded = work(job.key[:KEY_BYTES], page_bytes(job.host_page))
        except Exception:
            logger.exception("A page was not copied between host memory and files")
        results.put(Moved(*job, succeeded))


def _stop(queues: list[_Jobs]) -> None:
    for jobs in queues:
        jobs.put(None)


class FileTier:
    """Starts to write and read pages, and reports those that are finished.

    Attributes:
        busy: host pages that a thread reads or writes, with the keys of their pages.
        reading: keys of pages that are being read from files.
        num_read: pages that were read from files so far.
        num_written: pages that were written to files so far.
        is_on: whether pages are looked up in files and written to files. It becomes false, and
            stays so, when the weights change, because the files then belong to another model.
    """

    def __init__(self, files: PageFiles, page_bytes: Callable[[int], memoryview]) -> None:
        """Start the threads, which end when this object is no longer used.

        Args:
            files: reads and writes the files of a folder.
            page_bytes: returns the bytes of a host page, as a view.
        """
        self.busy: dict[int, bytes] = {}
        self.reading: set[bytes] = set()
        self.num_read = self.num_written = 0
        self.is_on = True
        self._files = files
        self._writes: _Jobs = queue.SimpleQueue()
        self._reads: _Jobs = queue.SimpleQueue()
        self._results: _Results = queue.SimpleQueue()
        queues = [self._writes, *[self._reads] * _NUM_READERS]
        for jobs in queues:
            work = (jobs, self._results, files, page_bytes)
            threading.Thread(target=_work, args=work, name="page-files", daemon=True).start()
        weakref.finalize(self, _stop, queues)

    def __contains__(self, key: bytes) -> bool:
        return self.is_on and key[:KEY_BYTES] in self._files

    @property
    def may_write(self) -> bool:
        """Whether another page may be written now."""
        return len(self.busy) - len(self.reading) < _MOST_WRITES

    def write(self, key: bytes, host_page: int) -> None:
        """Start to write a host page to the file of its key."""
        self.busy[host_page] = key
        self._writes.put(_Job(key, host_page, is_read=False))

    def read(self, key: bytes, host_page: int) -> None:
        """Start to read the file of a key into a host page."""
        self.busy[host_page] = key
        self.reading.add(key)
        self._reads.put(_Job(key, host_page, is_read=True))

    def finished(self) -> Iterator[Moved]:
        """Yield the writes and reads that finished since the last call."""
        while True:
            try:
                moved = self._results.get_nowait()
            except queue.Empty:
                return
            del self.busy[moved.host_page]
            if moved.is_read:
                self.reading.discard(moved.key)
                self.num_read += moved.succeeded
            else:
                self.num_written += moved.succeeded
            yield moved

    def is_waiting(self, fetch: Fetch) -> bool:
        """Whether a request should still wait for its pages."""
        return not self.reading.isdisjoint(fetch.keys) and time.monotonic() < fetch.until
