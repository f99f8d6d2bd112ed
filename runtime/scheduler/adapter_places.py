"""Decides which LoRA adapters are in device memory.

Device memory for adapters is divided into slots, each of which holds one adapter. A slot is in use
while requests run with its adapter. An unused slot keeps its adapter until another adapter needs
the slot. By default the least recently used slot is overwritten first.

The plan of a step lists the adapters to copy into slots. Adapters of waiting requests are copied
before these requests are admitted, so that the copy does not delay the requests' first step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable

from runtime.ipc.messages import ControlReply
from runtime.ipc.weight_messages import AdapterStatus, LoadAdapter, UnloadAdapter, WeightCall
from runtime.scheduler.request import Request
from runtime.scheduler.waiting import WaitingQueue
from runtime.step.executor import WeightHandler
from runtime.step.step_plan import AdapterCopy

# After this time, a request without a slot is no longer overtaken: later requests may not take the
# next slot that becomes free.
PATIENCE_S = 1.0
# Number of waiting requests, from the head of the queue, whose adapters are copied in advance.
AHEAD = 16


class AdapterPlaces:
    """Tracks which adapter is in each device slot, and which adapters are in host memory."""

    def __init__(
        self, num_slots: int, evicts_oldest: bool = False, patience_s: float = PATIENCE_S
    ) -> None:
        """Start with empty slots and without adapters.

        Args:
            num_slots: number of adapters that fit on the device; 0 if the server takes no adapters.
            evicts_oldest: overwrite the adapter that was copied to the device first, instead of the
                least recently used one.
            patience_s: how long later requests may overtake a request that finds no slot, seconds.
        """
        self._patience_s = patience_s
        self._evicts_oldest = evicts_oldest
        self._loaded: set[int] = set()
        self._pinned: set[int] = set()
        # For each slot: the id of its adapter (0 for none), the number of running requests with
        # this adapter, and the value of `_clock` at its last use.
        self._held = [0] * num_slots
        self._num_running = [0] * num_slots
        self._used_at = [0] * num_slots
        self._clock = itertools.count(1)
        self._copies: list[AdapterCopy] = []
        # The first request that found no slot: its id, and the time when it found none.
        self._blocked: tuple[int, float] | None = None

    @property
    def num_slots(self) -> int:
        """The most different adapters that one step may use."""
        return len(self._held)

    @property
    def num_used(self) -> int:
        """Number of slots whose adapters are used by running requests."""
        return sum(count > 0 for count in self._num_running)

    def running(self) -> dict[int, int]:
        """Number of running requests by adapter."""
        counts = zip(self._held, self._num_running, strict=True)
        return {adapter_id: count for adapter_id, count in counts if count}

    def change(
        self, call: WeightCall, ranks: WeightHandler, requests: Iterable[Request]
    ) -> ControlReply:
        """Load an adapter into host memory, or remove one. Steps may be in flight meanwhile.

        Args:
            call: a call whose operation is an `AdapterOp`.
            ranks: executes the call on all ranks.
            requests: all requests that run or wait.

        Returns:
            The reply of `ranks`. A failure if requests still use the adapter to remove.
        """
        op = call.op
        if isinstance(op, UnloadAdapter):
            num_left = sum(each.adapter_id == op.adapter_id for each in requests)
            if num_left:
                return ControlReply(call.call_id, False, f"{num_left} requests use the adapter.")
            # A step in flight may still read the slot. The slot's content stays until another
            # adapter is copied there.
            self._loaded.discard(op.adapter_id)
            self._pinned.discard(op.adapter_id)
            self._copies = [copy for copy in self._copies if copy.adapter_id != op.adapter_id]
            self._held = [0 if held == op.adapter_id else held for held in self._held]
        reply = ranks.handle(call)
        if isinstance(op, LoadAdapter | AdapterStatus) and reply.success and reply.message:
            self._loaded.add(op.adapter_id)
            if op.is_pinned:
                self._pinned.add(op.adapter_id)
        return reply

    def has(self, adapter_id: int) -> bool:
        """Whether the adapter is loaded, so that requests may use it; true for 0, no adapter."""
        return not adapter_id or adapter_id in self._loaded

    def admits(self, request: Request) -> bool:
        """Whether the adapter of a waiting request is in a slot or can be copied to one.

        When an earlier request has found no slot, later requests may still be admitted, but only
        for `patience_s` seconds.
        """
        if not request.adapter_id:
            return True
        blocked = self._blocked
        if blocked is not None and blocked[0] != request.request_id:
            waited_s = time.monotonic() - blocked[1]
            return waited_s < self._patience_s and self._find(request.adapter_id) is not None
        if self._find(request.adapter_id) is not None:
            self._blocked = None
            return True
        if blocked is None:
            self._blocked = request.request_id, time.monotonic()
        return False

    def take(self, request: Request) -> None:
        """Reserve the slot of an admitted request's adapter; copy the adapter there if needed.

        The copy is part of the next plan. The slot's index is stored in `request.adapter_slot`.
        """
        if not request.adapter_id:
            return
        slot = self._bring(request.adapter_id)
        assert slot is not None, "it was admitted"
        self._num_running[slot] += 1
        request.adapter_slot = slot

    def leave(self, request: Request) -> None:
        """Release the adapter's slot when its request has ended or was put back into the queue."""
        slot, request.adapter_slot = request.adapter_slot, -1
        if slot >= 0:
            self._num_running[slot] -= 1
            if not self._evicts_oldest:
                self._used_at[slot] = next(self._clock)

    def distrust(self) -> None:
        """Treat all slots as empty, because copies may have failed. No request may be running."""
        self._held = [0] * self.num_slots
        self._copies.clear()

    def bring_ahead(self, waiting: WaitingQueue) -> None:
        """Schedule copies of adapters of the first waiting requests into unused slots."""
        blocked = self._blocked
        if blocked is not None and all(each.request_id != blocked[0] for each in waiting):
            self._blocked = None
        wanted = [request.adapter_id for request in itertools.islice(waiting, AHEAD)]
        for adapter_id in dict.fromkeys(wanted):
            if adapter_id and adapter_id not in self._held:
                slot = self._free_slot(but=wanted)
                if slot is None:
                    return
                self._fill(slot, adapter_id)

    def take_copies(self) -> list[AdapterCopy]:
        """Return the copies that the next plan must carry, and forget them here."""
        copies, self._copies = self._copies, []
        return copies

    def _find(self, adapter_id: int) -> int | None:
        """Return the slot that holds the adapter, or one that it may overwrite; else `None`."""
        if adapter_id in self._held:
            return self._held.index(adapter_id)
        return self._free_slot()

    def _free_slot(self, but: Collection[int] = ()) -> int | None:
        """Return the slot to overwrite first, or `None`.

        Three kinds of slots are excluded: slots in use, slots with a pinned adapter, and slots with
        an adapter in `but`.
        """
        free = [
            slot
            for slot, held in enumerate(self._held)
            if not self._num_running[slot] and held not in self._pinned
            if not held or held not in but
        ]
        return min(free, key=lambda slot: self._used_at[slot], default=None)

    def _bring(self, adapter_id: int) -> int | None:
        slot = self._find(adapter_id)
        if slot is not None and self._held[slot] != adapter_id:
            self._fill(slot, adapter_id)
        return slot

    def _fill(self, slot: int, adapter_id: int) -> None:
        self._held[slot] = adapter_id
        self._used_at[slot] = next(self._clock)
        self._copies = [copy for copy in self._copies if copy.slot != slot]
        self._copies.append(AdapterCopy(slot, adapter_id))
