"""A radix tree from token ids to pages; it finds prefixes whose keys and values are cached.

Each edge of the tree holds the tokens of one or more whole pages. So a child is found by the bytes
of its first page, and a match takes one array comparison per node, not a loop over tokens.

Source: RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", 2024).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.cache.host_tier import HostTier, root_key
from runtime.cache.kv_events import KVEventLog
from runtime.cache.page_pool import EMPTY_PAGES, Pages
from runtime.cache.snapshots import Snapshots

Tokens = NDArray[np.int32]
# Most pages that `common_after` compares, which takes a few microseconds.
_MAX_COMPARED = 64


class RadixNode:
    """A node of the tree, with the edge from its parent.

    Attributes:
        parent: the parent; `None` for the root of a namespace.
        tokens: `[num_pages * page_size]` int32, keys of the edge.
        pages: `[num_pages]` int32, the pages that hold these tokens.
        namespace: the namespace, in a root only.
        children: the children, by the bytes of their first page of tokens.
        lock_count: number of running requests that use the node's pages.
        last_access: value of the tree's counter when the node was last used.
        snapshot: slot of the recurrent states at the node's end; 0 for none.
        num_pins: number of running requests that read this snapshot.
        hashes: for each page the hash that names it in events; empty while no events are published.
        is_listed: whether the node is in the tree's list of leaves that may be evicted.
    """

    __slots__ = (
        *("children", "hashes", "is_listed", "keys", "last_access", "lock_count", "namespace"),
        *("num_pins", "pages", "parent", "snapshot", "tokens"),
    )

    def __init__(
        self, parent: RadixNode | None, tokens: Tokens, pages: Pages, namespace: str = ""
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.namespace = namespace
        self.children: dict[bytes, RadixNode] = {}
        self.lock_count = 0
        self.last_access = 0
        self.snapshot = self.num_pins = 0
        # The hash of each page, which events use as the page's name; empty while no events are
        # published.
        self.hashes: list[int] = []
        # The key of each page, by which the host tier finds it; empty without a host tier.
        self.keys: list[bytes] = []
        # Whether this node has an entry in the list of leaves that may be evicted.
        self.is_listed = False

    @property
    def last_key(self) -> bytes:
        """The host tier's key of the page before the node's end."""
        return self.keys[-1] if self.keys else root_key(self.namespace)


@dataclass
class PrefixMatch:
    """The longest cached prefix of a sequence: its pages in order, and the node where it ends."""

    pages: Pages
    node: RadixNode


@dataclass(frozen=True)
class CommonPrefix:
    """The common beginning of a sequence and of the cached sequence that is most similar.

    Attributes:
        num_tokens: number of common tokens.
        differs: whether both sequences continue, with different tokens. False if the cached
            sequence ends there, or if the whole sequence is cached.
    """

    num_tokens: int
    differs: bool


class RadixTree:
    """The cached prefixes, with a separate root for each namespace.

    Attributes:
        page_size: number of tokens per page.
        num_pages: number of pages in all nodes.
        num_locked_pages: number of pages that running requests use, so that they cannot be evicted.
        snapshots: the snapshots of recurrent states at the ends of nodes.
        events: records which pages enter and leave the tree; `None` for no record.
        host: gets the pages that are evicted; `None` if there is no host tier.
    """

    def __init__(self, page_size: int) -> None:
        """Create an empty tree for pages of `page_size` tokens."""
        self.page_size = page_size
        self.events: KVEventLog | None = None
        self.host: HostTier | None = None
        self.snapshots = Snapshots()
        self.num_pages = 0
        self.num_locked_pages = 0
        self._roots: dict[str, RadixNode] = {}
        self._clock = itertools.count(1)
        # A heap of leaves that may be evicted, ordered by their last access when they were added.
        # A leaf may have been used, locked or extended since, so it is checked when it is popped.
        self._leaves: list[tuple[int, int, RadixNode]] = []
        self._serial = itertools.count()

    def count_pages(self, tokens: Tokens, namespace: str) -> int:
        """Return the number of pages in the longest cached prefix; the tree does not change."""
        return sum(num_pages for _, num_pages in self._path(tokens, namespace))

    def count_resumable(self, tokens: Tokens, namespace: str) -> int:
        """Return the number of pages up to the last snapshot on the path of `tokens`.

        A model with recurrent states can resume only there. The tree does not change.
        """
        total = found = 0
        for node, num_pages in self._path(tokens, namespace):
            total += num_pages
            if node.snapshot and num_pages == len(node.pages):
                found = total
        return found

    def find(self, tokens: Tokens, namespace: str) -> Pages:
        """Return the pages of the longest cached prefix of `tokens`; the tree does not change."""
        found = [node.pages[:num_pages] for node, num_pages in self._path(tokens, namespace)]
        return np.concatenate(found) if found else EMPTY_PAGES

    def match(self, tokens: Tokens, namespace: str) -> PrefixMatch:
        """Return the longest cached prefix of `tokens`, in whole pages.

        If the prefix ends inside a node, the node is split there. The nodes of the prefix count as
        used now.
        """
        node = self._roots.get(namespace)
        if node is None:
            node = RadixNode(None, np.empty(0, dtype=np.int32), EMPTY_PAGES, namespace)
        now = next(self._clock)
        found: list[Pages] = []
        for step, num_pages in self._path(tokens, namespace):
            node = step if num_pages == len(step.pages) else self._split(step, num_pages)
            node.last_access = now
            found.append(node.pages)
        return PrefixMatch(np.concatenate(found) if found else EMPTY_PAGES, node)

    def common_prefix(self, tokens: Tokens, namespace: str) -> CommonPrefix:
        """Return how many of `tokens` the most similar cached sequence has in common with them.

        The number is exact: it need not be a multiple of the page size. The tree does not change,
        and no node counts as used.
        """
        root = self._roots.get(namespace)
        if root is None:
            return CommonPrefix(0, differs=False)
        return self._common(root, tokens, most_compared=None)

    def common_after(self, node: RadixNode, rest: Tokens) -> CommonPrefix:
        """Return how many of `rest` agree with the cached sequences that continue at `node`.

        At most a fixed number of cached pages is compared at one branching point. If more cached
        sequences continue with different pages there, the common part ends before these pages.
        """
        return self._common(node, rest, most_compared=_MAX_COMPARED)

    def _common(self, node: RadixNode, rest: Tokens, most_compared: int | None) -> CommonPrefix:
        num_tokens = 0
        while node.children and num_tokens < len(rest):
            left = rest[num_tokens:]
            child = node.children.get(self._key(left))
            if child is None:
                if most_compared is not None and len(node.children) > most_compared:
                    return CommonPrefix(num_tokens, differs=True)
                firsts = np.frombuffer(b"".join(node.children), dtype=np.int32)
                num_tokens += self._common_first(firsts.reshape(-1, self.page_size), left)
                return CommonPrefix(num_tokens, differs=num_tokens < len(rest))
            common = _longest_common(child.tokens[None], left)
            num_tokens += common
            if common < len(child.tokens):
                return CommonPrefix(num_tokens, differs=num_tokens < len(rest))
            node = child
        return CommonPrefix(num_tokens, differs=False)

    def _common_first(self, firsts: Tokens, rest: Tokens) -> int:
        """Return how many first tokens of `rest` agree with the most similar one of `firsts`.

        Args:
            firsts: `[num_pages, page_size]` int32, the tokens of pages.
            rest: tokens that begin with none of these pages.
        """
        if len(rest) < self.page_size:
            return _longest_common(firsts, rest)
        # No page is equal to the first page of `rest`, so each has a first difference.
        return int((firsts != rest[: self.page_size]).argmax(axis=1).max())

    def insert(self, tokens: Tokens, pages: Pages, namespace: str) -> PrefixMatch:
        """Add a sequence to the tree.

        If the tree already has a prefix of the sequence, the tree keeps its own pages for it. The
        returned match has these pages, and the caller frees its duplicates.

        Args:
            tokens: `[num_pages * page_size]` int32, the keys of the sequence.
            pages: `[num_pages]` int32, the pages that hold these tokens.
            namespace: the sequence's namespace.
        """
        match = self.match(tokens, namespace)
        num_known = len(match.pages)
        if num_known == len(pages):
            return match
        if not num_known:
            self._roots[namespace] = match.node
        rest = tokens[num_known * self.page_size :].copy()
        node = RadixNode(match.node, rest, pages[num_known:].copy())
        node.last_access = next(self._clock)
        match.node.children[self._key(rest)] = node
        if self.events is not None:
            parent = match.node.hashes[-1] if match.node.hashes else None
            node.hashes = self.events.stored(rest, parent, namespace)
        if self.host is not None:
            node.keys = list(self.host.keys(rest, match.node.last_key))
        self.num_pages += len(node.pages)
        self._list(node)
        return PrefixMatch(np.concatenate([match.pages, node.pages]), node)

    def lock(self, node: RadixNode) -> None:
        """Protect the nodes from the root to `node` from eviction; each call needs an `unlock`."""
        step: RadixNode | None = node
        while step is not None and step.parent is not None:
            if step.lock_count == 0:
                self.num_locked_pages += len(step.pages)
            step.lock_count += 1
            step = step.parent

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock` of the same node."""
        step: RadixNode | None = node
        while step is not None and step.parent is not None:
            assert step.lock_count > 0, "unlocked more often than locked"
            step.lock_count -= 1
            if step.lock_count == 0:
                self.num_locked_pages -= len(step.pages)
                self._list(step)
            step = step.parent

    def unpin(self, node: RadixNode) -> None:
        """Undo one `Snapshots.pin` of the same node."""
        self.snapshots.unpin(node)
        self._list(node)

    def lock_only(self, nodes: list[RadixNode]) -> None:
        """Undo all locks, then lock each of `nodes` once."""
        for node in self._nodes():
            node.lock_count = 0
        self.num_locked_pages = 0
        for node in nodes:
            self.lock(node)
        for node in self._nodes():
            self._list(node)

    def evict(self, num_pages: int, *, to_host: bool = False) -> Pages:
        """Remove the least recently used leaves, and return their pages.

        Leaves are removed until `num_pages` pages are free. Fewer are returned if all other nodes
        are locked. With `to_host` the pages move to the host tier, if there is one.
        """
        freed: list[Pages] = []
        num_freed = 0
        while self._leaves and num_freed < num_pages:
            listed, _, node = heapq.heappop(self._leaves)
            node.is_listed = False
            if node.last_access > listed or not _evictable(node):
                self._list(node)
                continue
            # Of a long leaf only the end is evicted, because its beginning can still be used.
            num_kept = max(0, num_freed + len(node.pages) - num_pages)
            freed.append(node.pages[num_kept:])
            if to_host:
                self.snapshots.save(node)
            self.snapshots.drop(node)
            num_freed += len(freed[-1])
            if self.events is not None:
                self.events.removed(node.hashes[num_kept:])
                node.hashes = node.hashes[:num_kept]
            if self.host is not None and to_host:
                self.host.save(node.keys[num_kept:], freed[-1])
            node.keys = node.keys[:num_kept]
            if num_kept:
                node.pages = node.pages[:num_kept]
                node.tokens = node.tokens[: num_kept * self.page_size]
                self._list(node)
            else:
                self._remove(node)
        self.num_pages -= num_freed
        return np.concatenate(freed) if freed else EMPTY_PAGES

    def discard(self, node: RadixNode) -> Pages:
        """Remove the snapshots on the path to `node`, and the nodes at its end that nothing uses.

        Snapshots that running requests read are kept.

        Returns:
            The pages of the removed nodes.
        """
        freed = [EMPTY_PAGES]
        while node.parent is not None:
            parent = node.parent
            if not node.num_pins:
                self.snapshots.drop(node)
            if _evictable(node):
                freed.append(node.pages)
                self.num_pages -= len(node.pages)
                if self.events is not None:
                    self.events.removed(node.hashes)
                self._remove(node)
                # The heap of leaves may still contain the node. Without a parent it is not evicted.
                node.parent = None
            node = parent
        return np.concatenate(freed)

    def all_pages(self) -> Pages:
        """Return all pages of the tree, for the check of invariants."""
        held = [node.pages for node in self._nodes()]
        return np.concatenate(held) if held else EMPTY_PAGES

    def _nodes(self) -> Iterator[RadixNode]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _path(self, tokens: Tokens, namespace: str) -> Iterator[tuple[RadixNode, int]]:
        """Yield the nodes along `tokens`, each with the number of its pages that match.

        All nodes but the last match completely. The caller may split the last node.
        """
        node = self._roots.get(namespace)
        rest = tokens[: len(tokens) - len(tokens) % self.page_size]
        while node is not None and len(rest):
            node = node.children.get(self._key(rest))
            if node is None:
                return
            num_pages = self._common_pages(node.tokens, rest)
            is_whole, rest = num_pages == len(node.pages), rest[len(node.tokens) :]
            yield node, num_pages
            if not is_whole:
                return

    def _list(self, node: RadixNode) -> None:
        """Add `node` to the heap of leaves that may be evicted, if it is such a leaf."""
        if not node.is_listed and _evictable(node):
            node.is_listed = True
            heapq.heappush(self._leaves, (node.last_access, next(self._serial), node))

    def _remove(self, node: RadixNode) -> None:
        """Remove a leaf, and its root if no other child is left; the parent may become a leaf."""
        parent = node.parent
        assert parent is not None
        del parent.children[self._key(node.tokens)]
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]
        self._list(parent)

    def _key(self, tokens: Tokens) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _common_pages(self, left: Tokens, right: Tokens) -> int:
        length = min(len(left), len(right))
        different = left[:length] != right[:length]
        first = int(different.argmax()) if different.any() else length
        return first // self.page_size

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Split `node` after `num_pages` pages, and return the new node with the first pages."""
        parent = node.parent
        assert parent is not None
        cut = num_pages * self.page_size
        upper = RadixNode(parent, node.tokens[:cut].copy(), node.pages[:num_pages].copy())
        upper.lock_count = node.lock_count
        upper.last_access = node.last_access
        upper.hashes, node.hashes = node.hashes[:num_pages], node.hashes[num_pages:]
        upper.keys, node.keys = node.keys[:num_pages], node.keys[num_pages:]
        parent.children[self._key(upper.tokens)] = upper
        node.tokens = node.tokens[cut:].copy()
        node.pages = node.pages[num_pages:].copy()
        node.parent = upper
        upper.children[self._key(node.tokens)] = node
        return upper


def _longest_common(rows: Tokens, tokens: Tokens) -> int:
    """Return how many first tokens the most similar one of `rows` has in common with `tokens`."""
    width = min(rows.shape[1], len(tokens))
    same = rows[:, :width] == tokens[:width]
    return int(np.logical_and.accumulate(same, axis=1).sum(axis=1).max())


def _evictable(node: RadixNode) -> bool:
    is_free = node.lock_count == node.num_pins == 0
    return is_free and node.parent is not None and not node.children
