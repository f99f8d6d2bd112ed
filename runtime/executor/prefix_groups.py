"""Finds sequences of a decode batch that share the first pages of their block tables.

The prefix cache gives requests with a common beginning, such as a system prompt, the same pages.
Attention can read the keys in such pages once for all these sequences. This needs one more kernel
launch per layer, so it is done only if it saves time.
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

# Batches below this size do not share reads: attention is a small part of their step.
MIN_BATCH = 8
_MIN_MEMBERS = 4
_MIN_TOKENS = 256
# Sharing pays if the number of key reads that it saves, times the number of key heads, is at least
# this. Measured on an H200 in bf16: microseconds per layer without and with sharing. "64 x (4096 +
# 80)" stands for 64 sequences with 4096 shared tokens and 80 tokens of their own each.
#   32 query heads, 8 key heads, head size 128:
#     64 x (4096 + 80): 152, 42; 64 x (1024 + 256): 60, 43; 64 x (256 + 256): 34, 40;
#     16 x (4096 + 80): 79, 28; 16 x (1024 + 256): 31, 27
#   14 query heads, 2 key heads, head size 64:
#     64 x (4096 + 80): 35, 19; 64 x (1024 + 256): 20, 18; 16 x (4096 + 80): 19, 15;
#     16 x (1024 + 256): 10, 15
_MIN_SAVED = 160_000


class PrefixGroups:
    """Finds the groups of a batch for which shared reads save time.

    A batch is searched again when its rows change.
    """

    def __init__(
        self, rows: BatchRows, page_size: int, num_kv_heads: int, attention: SharesPrefixes
    ) -> None:
        """Prepare to search the block tables in `rows` and to pass the groups to `attention`.

        Args:
            rows: the rows of the running batch.
            page_size: number of tokens per page.
            num_kv_heads: number of key heads of a layer; the largest number if layers differ.
            attention: the attention back end that reads the keys.
        """
        self._min_saved = _MIN_SAVED / num_kv_heads
        self._rows = rows
        self._page_size = page_size
        self._attention = attention
        self._groups: list[PrefixGroup] = []
        self._sent: list[PrefixGroup] | None = None
        self._batch: tuple[int, bytes] | None = None

    def find(self, batch: Int64Array, seq_lens: Int64Array) -> bool:
        """Search a batch for groups; return whether shared reads save time.

        Args:
            batch: `[num_seqs]` int64, the batch rows that decode.
            seq_lens: `[num_seqs]` int64, number of keys of each row, including the newest one.
                While the batch stays the same, lengths only grow, so its groups stay valid.
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
        """Pass the groups that the last `find` found to attention."""
        if self._sent is not self._groups:
            self._attention.put_prefixes(self._groups)
            self._sent = self._groups

    def clear(self) -> None:
        """Remove all groups from attention, until `send` is called."""
        self._attention.put_prefixes([])
        self._sent = None


def find_groups(
    page_table: NDArray[np.int32], batch: Int64Array, seq_lens: Int64Array, page_size: int
) -> list[PrefixGroup]:
    """Return groups of at least 4 sequences that share the pages of their first 256 tokens or more.

    The prefix cache shares pages from the first one on. So if two block tables have the same page
    at the same index, their sequences begin with the same tokens up to there. A row can be in one
    group only, either with few rows and a long prefix or with many rows and a shorter one. The
    groups that save the most reads are chosen first.

    Args:
        page_table: `[num_rows, max_pages]` int32, block tables.
        batch: `[num_seqs]` int64, rows of `page_table`.
        seq_lens: `[num_seqs]` int64, number of keys of each sequence, with the newest one.
        page_size: number of tokens per page.

    Returns:
        At most `MAX_GROUPS` groups. Each member has at least one token after the shared prefix.
    """
    # Number of pages that end before the newest key.
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
        # The next level has twice as many pages, and not all members share them or have so many.
        most = min(int(full[members].min()), 2 * chosen.depth - 1)
        pages = _common_pages(page_table, batch[members], chosen.depth, most)
        groups.append(PrefixGroup(members, pages * page_size))
        for level in levels:
            level.take(members)
    return groups


@dataclass
class _Level:
    """Which sequences share their first `depth` pages.

    Attributes:
        depth: number of pages.
        labels: `[num_seqs]`, equal numbers for sequences that share the page at index `depth - 1`;
            0 for sequences that have fewer pages.
        counts: number of sequences with each label; 0 for label 0.
    """

    depth: int
    labels: Int64Array
    counts: Int64Array

    def take(self, members: Int64Array) -> None:
        """Remove the sequences `members` from this level."""
        self.counts -= np.bincount(self.labels[members], minlength=len(self.counts))
        self.counts[0] = 0
        self.labels[members] = 0


def _levels(
    page_table: NDArray[np.int32], batch: Int64Array, full: Int64Array, depth: int
) -> Iterator[_Level]:
    """Yield levels with `depth` pages, then twice as many, while some group is large enough."""
    while True:
        deep = np.flatnonzero(full >= depth)
        if len(deep) < _MIN_MEMBERS:
            return
        pages = page_table[batch[deep], depth - 1]
        # This numbers the pages as `np.unique` would, in half its time.
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
    """Return how many pages at the beginning all `rows` share, a number in `[least, most]`."""
    while least < most:
        middle = (least + most + 1) // 2
        column = page_table[rows, middle - 1]
        if (column == column[0]).all():
            least = middle
        else:
            most = middle - 1
    return least
