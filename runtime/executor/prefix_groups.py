"""Finds rows of a decode batch that begin with the same pages of the KV cache.

The radix cache gives requests with a common beginning, such as a system prompt, the same pages.
Attention reads the keys in such pages once for all these rows, if that is worth one more launch per
layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.paged_attention.prefix_group import MAX_GROUPS, PrefixGroup
from runtime.executor.batch_rows import BatchRows
from runtime.models.attention.backend import SharesPrefixes
from runtime.step.step_plan import Int64Array

# Smaller batches never share: attention is a small part of their step.
MIN_BATCH = 8
_MIN_MEMBERS = 4
_MIN_TOKENS = 256
# Saved key reads times key heads from which sharing pays. Measured on an H200, bf16, microseconds
# per layer without and with it, for sequences x (shared + own tokens):
#   32/8 heads of 128: 64 x (4096 + 80) 152, 42; 64 x (1024 + 256) 60, 43; 64 x (256 + 256) 34, 40;
#     16 x (4096 + 80) 79, 28; 16 x (1024 + 256) 31, 27
#   14/2 heads of 64: 64 x (4096 + 80) 35, 19; 64 x (1024 + 256) 20, 18; 16 x (4096 + 80) 19, 15;
#     16 x (1024 + 256) 10, 15
_MIN_SAVED = 160_000


class PrefixGroups:
    """The groups of a batch that are worth sharing; searched again only when its rows change."""

    def __init__(
        self, rows: BatchRows, page_size: int, num_kv_heads: int, attention: SharesPrefixes
    ) -> None:
        """Search the pages in `rows` and pass the groups to `attention`.

        Args:
            rows: rows of the running batch.
            page_size: tokens of a page.
            num_kv_heads: key heads of a layer, the most if layers differ.
            attention: the back end that reads the keys.
        """
        self._min_saved = _MIN_SAVED / num_kv_heads
        self._rows = rows
        self._page_size = page_size
        self._attention = attention
        self._groups: list[PrefixGroup] = []
        self._sent: list[PrefixGroup] | None = None
        self._batch: tuple[int, bytes] | None = None

    def find(self, batch: Int64Array, seq_lens: Int64Array) -> bool:
        """Search a batch; return whether it has groups worth sharing.

        Args:
            batch: `[num_seqs]`, the rows that decode.
            seq_lens: `[num_seqs]`, keys of each row, the newest included. They only grow while the
                batch stays the same, so groups found before stay valid.
        """
        if len(batch) < MIN_BATCH:
            return False
        now = self._rows.num_changes, batch.tobytes()
        if now != self._batch:
            table = self._rows.page_table_host
            groups = find_groups(table, batch, seq_lens, self._page_size)
            saved = sum((len(each.members) - 1) * each.length for each in groups)
            self._batch, self._groups = now, groups if saved >= self._min_saved else []
        return bool(self._groups)

    def send(self) -> None:
        """Pass the groups of the batch searched last to attention."""
        if self._sent is not self._groups:
            self._attention.put_prefixes(self._groups)
            self._sent = self._groups

    def clear(self) -> None:
        """Pass no groups to attention, until `send` is called."""
        self._attention.put_prefixes([])
        self._sent = None


def find_groups(
    page_table: NDArray[np.int32], batch: Int64Array, seq_lens: Int64Array, page_size: int
) -> list[PrefixGroup]:
    """Return groups of at least 4 sequences whose first 256 tokens or more are in the same pages.

    The radix cache shares pages from the first one on. So rows whose tables have the same page at
    the same index begin with the same tokens up to there. In a tree of prefixes, a long prefix of
    few rows and a short one of many exclude each other; the one that saves most is taken first.

    Args:
        page_table: `[num_rows, max_pages]`.
        batch: `[num_seqs]`, rows of `page_table`.
        seq_lens: `[num_seqs]`, keys of each, the newest included.
        page_size: tokens of a page.

    Returns:
        At most `MAX_GROUPS` groups; every member has a token after its prefix.
    """
    # Pages that end before the newest key.
    full = (seq_lens - 1) // page_size
    levels = list(_levels(page_table, batch, full, max(1, _MIN_TOKENS // page_size)))
    groups: list[PrefixGroup] = []
    while len(groups) < MAX_GROUPS:
        best, chosen = 0, None
        for level in levels:
            most = int(level.counts.max())
            if most >= _MIN_MEMBERS and (most - 1) * level.depth > best:
                best, chosen = (most - 1) * level.depth, level
        if chosen is None:
            break
        members = np.flatnonzero(chosen.labels == chosen.counts.argmax())
        # Not all members share the next level's page, or some end before it.
        most = min(int(full[members].min()), 2 * chosen.depth - 1)
        pages = _common_pages(page_table, batch[members], chosen.depth, most)
        groups.append(PrefixGroup(members, pages * page_size))
        for level in levels:
            level.take(members)
    return groups


@dataclass
class _Level:
    """The rows that share all pages up to a depth.

    Attributes:
        depth: number of that page, from 1 on.
        labels: `[num_seqs]`, equal for sequences that share the page; 0 for those without it.
        counts: number of sequences with each label; 0 for label 0.
    """

    depth: int
    labels: Int64Array
    counts: Int64Array

    def take(self, members: Int64Array) -> None:
        """Exclude `members` from now on."""
        self.counts -= np.bincount(self.labels[members], minlength=len(self.counts))
        self.counts[0] = 0
        self.labels[members] = 0


def _levels(
    page_table: NDArray[np.int32], batch: Int64Array, full: Int64Array, depth: int
) -> Iterator[_Level]:
    """Yield the groups that share `depth` pages, then twice as many, while enough do."""
    while True:
        deep = np.flatnonzero(full >= depth)
        if len(deep) < _MIN_MEMBERS:
            return
        pages = page_table[batch[deep], depth - 1]
        # The numbering of `np.unique`, in half its time.
        order = pages.argsort()
        ordered = pages[order]
        numbers = np.ones(len(deep), dtype=np.int64)
        np.cumsum(ordered[1:] != ordered[:-1], out=numbers[1:])
        numbers[1:] += 1
        labels = np.zeros(len(batch), dtype=np.int64)
        labels[deep[order]] = numbers
        counts = np.bincount(numbers)
        if counts.max() < _MIN_MEMBERS:
            return
        yield _Level(depth, labels, counts)
        depth *= 2


def _common_pages(page_table: NDArray[np.int32], rows: Int64Array, least: int, most: int) -> int:
    """Return how many pages all `rows` have in common; the number is in `[least, most]`."""
    while least < most:
        middle = (least + most + 1) // 2
        column = page_table[rows, middle - 1]
        if (column == column[0]).all():
            least = middle
        else:
            most = middle - 1
    return least
