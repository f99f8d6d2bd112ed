"""Manages the slots of recurrent states, for running requests and for cached prefixes.

A slot has the states of all recurrent layers after a number of tokens of one sequence. A step reads
each sequence's states from one slot and writes the new states to another slot. So if the step
fails, or if its token is dropped, the old states still exist. Several sequences with the same
beginning may read the same snapshot; each writes to a slot of its own.

Every slot is in exactly one place: free, reserved for a running request, or a snapshot in the
prefix tree. Running requests have priority: snapshots use only slots that no request needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.cache.page_pool import PagePool
from runtime.cache.radix_tree import RadixNode, RadixTree, Tokens
from runtime.step.step_plan import Int32Array, Int64Array, StateMoves

# Number of slots that each running request needs: for the states that a step reads, for those that
# it writes, and for the latest states at the end of a page.
SLOTS_PER_HOLD = 3
# Most slots of a request, with those for snapshots that are not in the prefix tree yet.
_NUM_PLACES = 8
_EMPTY = -1


class StatePool:
    """The slots of recurrent states, and which slots each running request has.

    A running request has a handle, called a hold: a row index of the arrays below. The columns of a
    row are places. A place has a slot, and the number of tokens after which the slot's states were
    saved. The next step reads the place with the most tokens.

    Attributes:
        slots: the free slots. Slot 0 has zeros, from which every sequence begins.
    """

    def __init__(self, num_slots: int, page_size: int, max_holds: int, tree: RadixTree) -> None:
        """Manage slots 1 to `num_slots` for at most `max_holds` running requests.

        `tree` is the prefix tree that has the snapshots, for pages of `page_size` tokens.
        """
        self.slots = PagePool(num_slots)
        self._page_size = page_size
        self._tree = tree
        self._slots_of: Int32Array = np.zeros((max_holds, _NUM_PLACES), dtype=np.int32)
        self._ends: Int64Array = np.full((max_holds, _NUM_PLACES), _EMPTY, dtype=np.int64)
        # Whether the hold owns the slot of a place. Other places are empty or read a snapshot.
        self._is_own = np.zeros((max_holds, _NUM_PLACES), dtype=bool)
        # Whether the slot of a place becomes a snapshot once the tree has the pages.
        self._is_pending = np.zeros((max_holds, _NUM_PLACES), dtype=bool)
        self._nodes: dict[tuple[int, int], RadixNode] = {}
        self._free_holds = list(range(max_holds - 1, -1, -1))
        self._max_holds = max_holds

    @property
    def num_slots(self) -> int:
        """Number of all slots."""
        return self.slots.num_pages

    @property
    def num_snapshots(self) -> int:
        """Number of slots that have snapshots of the prefix tree."""
        return len(self._tree.snapshots)

    @property
    def _num_claimed(self) -> int:
        num_holds = self._max_holds - len(self._free_holds)
        return SLOTS_PER_HOLD * num_holds + int(self._is_pending.sum())

    @property
    def admits(self) -> bool:
        """Whether there are enough slots for another running request."""
        return bool(self._free_holds) and self._num_claimed + SLOTS_PER_HOLD <= self.num_slots

    def begin(self, node: RadixNode | None, num_tokens: int) -> int:
        """Return a hold for a new request.

        Args:
            node: the tree node at which the request's cached prefix ends; it has a snapshot.
            num_tokens: number of tokens of this prefix; 0 to begin with zeros.
        """
        hold = self._free_holds.pop()
        if node is not None and num_tokens:
            self._tree.snapshots.use(node)
            self._borrow(hold, 0, node, num_tokens)
        return hold

    def resume(self, hold: int, num_tokens: int) -> int:
        """Return a slot that will receive a hold's states after `num_tokens` tokens."""
        place = self._new_place(hold)
        self._ends[hold, place] = num_tokens
        return int(self._slots_of[hold, place])

    def advance(
        self,
        holds: Int64Array,
        starts: Int64Array,
        lens: Int64Array,
        points: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> StateMoves:
        """Choose the slots that a step reads and writes, and record that the step is done.

        Args:
            holds: `[num_seqs]` int64, the hold of each sequence.
            starts: `[num_seqs]` int64, number of tokens before the step.
            lens: `[num_seqs]` int64, number of new tokens.
            points: for some sequences, by their index, the token counts after which a snapshot is
                wanted. They are ends of pages within the new tokens. If no slot is free for a
                snapshot, it is omitted.
        """
        if self._nodes:
            self._return_snapshots(dict(zip(holds.tolist(), starts.tolist(), strict=True)))
        ends, own = self._ends[holds], self._is_own[holds]
        is_read = (ends == starts[:, None]) & (ends > 0)
        assert (is_read.any(axis=1) | (starts == 0)).all(), "a state is missing"
        read_place = is_read.argmax(axis=1)
        reads = np.where(is_read.any(axis=1), self._slots_of[holds, read_place], 0)
        # The latest place at the end of a page is kept: the output may end before the next page is
        # full, and only states at the end of a page can become a snapshot.
        whole = np.where(own & (ends % self._page_size == 0), ends, _EMPTY)
        is_latest = (whole == whole.max(axis=1, keepdims=True)) & (whole > 0)
        is_used = is_read | is_latest | self._is_pending[holds]
        may_write = own & ~is_used
        writes_again = may_write.any(axis=1)
        place = may_write.argmax(axis=1)
        for index in np.flatnonzero(~writes_again).tolist():
            place[index] = self._new_place(int(holds[index]))
        self._ends[holds, place] = starts + lens
        slots = self._slots_of[holds, place]
        seqs = np.arange(len(holds), dtype=np.int32)
        if not points:
            return StateMoves(reads, seqs, lens.astype(np.int32), slots)
        saves = list(zip(seqs.tolist(), lens.tolist(), slots.tolist(), strict=True))
        for index, wanted in points:
            hold, start = int(holds[index]), int(starts[index])
            last = start + int(lens[index])
            for end in wanted:
                if end == last:
                    self._is_pending[hold, place[index]] = self._may_wait(hold)
                elif start < end < last and (slot := self._pending_slot(hold, end)):
                    saves.append((index, end - start, slot))
        table = np.array(sorted(saves), dtype=np.int32)
        return StateMoves(reads, *(np.ascontiguousarray(column) for column in table.T))

    def _return_snapshots(self, starts: dict[int, int]) -> None:
        """Unpin the snapshots that holds no longer read.

        `starts` has the number of tokens before the next step for each hold.
        """
        for hold, place in list(self._nodes):
            if starts.get(hold, self._ends[hold, place]) != self._ends[hold, place]:
                self._give_back(hold, place)

    def _new_place(self, hold: int) -> int:
        """Take a slot for the next states of a request.

        Returns the index of the slot among the slots of the request's `hold`.
        """
        place = int(np.flatnonzero(self._ends[hold] == _EMPTY)[0])
        self._slots_of[hold, place] = self._take()
        self._is_own[hold, place] = True
        return place

    def _pending_slot(self, hold: int, end: int) -> int:
        """Take a slot for a snapshot after `end` tokens, and return it; 0 if none can be spared."""
        if end in self._ends[hold] or not self._may_wait(hold):
            return 0
        place = self._new_place(hold)
        self._ends[hold, place] = end
        self._is_pending[hold, place] = True
        return int(self._slots_of[hold, place])

    def _may_wait(self, hold: int) -> bool:
        """Whether a hold may use one more slot for a snapshot that is not in the tree yet."""
        num_pending = int(self._is_pending[hold].sum())
        has_place = num_pending < _NUM_PLACES - SLOTS_PER_HOLD
        return has_place and self._num_claimed < self.num_slots

    def _take(self) -> int:
        self.collect()
        if self.slots.num_free:
            return int(self.slots.take(1)[0])
        slot = self._tree.snapshots.evict()
        assert slot is not None, "holds claim more slots than there are"
        return slot

    def collect(self) -> None:
        """Free the slots of snapshots whose nodes were removed from the tree."""
        freed = self._tree.snapshots.freed
        if freed:
            self.slots.give_back(np.array(freed, dtype=np.int32))
            freed.clear()

    def share(self, hold: int, tokens: Tokens, namespace: str, *, is_over: bool = False) -> None:
        """Put the states that a hold has saved as snapshots into the prefix tree.

        Args:
            hold: handle of the running request; it stays valid.
            tokens: the sequence's computed tokens whose pages are in the tree.
            namespace: the sequence's namespace in the tree.
            is_over: whether the request ends. Then its latest states at the end of a page become a
                snapshot, too.
        """
        ends = self._ends[hold]
        fits = self._is_own[hold] & (ends <= len(tokens)) & (ends > 0)
        fits &= ends % self._page_size == 0
        wanted = fits & self._is_pending[hold]
        if is_over and fits.any():
            wanted[np.where(fits, ends, _EMPTY).argmax()] = True
        current = int(ends.argmax())
        for place in np.flatnonzero(wanted).tolist():
            end, is_current = int(ends[place]), place == current and not is_over
            match = self._tree.match(tokens[:end], namespace)
            self._is_pending[hold, place] = False
            if len(match.pages) * self._page_size < end or match.node.snapshot:
                # The tree has a snapshot of another request at this point.
                if not is_current:
                    self._give_back(hold, place)
                continue
            self._tree.snapshots.put(match.node, int(self._slots_of[hold, place]))
            if is_current:
                self._borrow(hold, place, match.node, end)
            else:
                self._clear(hold, place)

    def end(self, hold: int) -> None:
        """Free a hold and its slots."""
        for place in range(_NUM_PLACES):
            self._give_back(hold, place)
        self._free_holds.append(hold)

    def _borrow(self, hold: int, place: int, node: RadixNode, end: int) -> None:
        self._tree.snapshots.pin(node)
        self._nodes[hold, place] = node
        self._slots_of[hold, place], self._ends[hold, place] = node.snapshot, end
        self._is_own[hold, place] = self._is_pending[hold, place] = False

    def _give_back(self, hold: int, place: int) -> None:
        if self._is_own[hold, place]:
            self.slots.give_back(self._slots_of[hold, place : place + 1])
        node = self._nodes.pop((hold, place), None)
        if node is not None:
            self._tree.unpin(node)
        self._clear(hold, place)

    def _clear(self, hold: int, place: int) -> None:
        self._slots_of[hold, place], self._ends[hold, place] = 0, _EMPTY
        self._is_own[hold, place] = self._is_pending[hold, place] = False

    def _taken(self) -> Int32Array:
        snapshots = [node.snapshot for node in self._tree.snapshots]
        waiting = self._tree.snapshots.freed
        return np.concatenate(
            [self._slots_of[self._is_own], np.array([*snapshots, *waiting], dtype=np.int32)]
        )

    def recover(self, holds: list[int]) -> None:
        """Free all holds except those in `holds`, and all slots that then belong to nothing."""
        lost = set(range(self._max_holds)).difference(holds)
        for key in [key for key in self._nodes if key[0] in lost]:
            del self._nodes[key]
        for hold in lost:
            for place in range(_NUM_PLACES):
                self._clear(hold, place)
        self._free_holds = sorted(lost, reverse=True)
        self._tree.snapshots.pin_only(list(self._nodes.values()))
        self._tree.snapshots.freed.clear()
        self.slots.reset(self._taken())

    def check_invariants(self, num_holds: int) -> None:
        """Assert that every slot is in exactly one place, and that there are `num_holds` holds.

        Raises:
            AssertionError: a slot or a hold is lost, or a slot is in two places.
        """
        everything = np.concatenate([self.slots.free_pages(), self._taken()])
        is_whole = np.array_equal(np.sort(everything), np.arange(1, self.num_slots + 1))
        assert is_whole, "slots of states were lost or doubled"
        assert self._max_holds - len(self._free_holds) == num_holds, "a hold was lost"
        assert bool(num_holds) or not self._tree.snapshots.num_pinned, "a snapshot stays pinned"
