"""Slots of adapters: who gets one, who makes room, and that no request waits for ever."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.ipc.messages import ControlReply, GenerateRequest
from runtime.ipc.weight_messages import LoadAdapter, UnloadAdapter, WeightCall
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduler.adapter_places import AdapterPlaces
from runtime.scheduler.request import Request


class Ranks:
    """Loads whatever it is told to."""

    can_compute = True

    def handle(self, call: WeightCall) -> ControlReply:
        return ControlReply(call.call_id, True, "loaded")


def request(request_id: int, adapter_id: int) -> Request:
    row = RowSpec(sampling=SamplingParams(max_new_tokens=1), adapter_id=adapter_id)
    ids = np.array([1], dtype=np.int32).tobytes()
    return Request(GenerateRequest(request_id, ids, RequestSpec(row=row)))


def places(
    num_slots: int, *, pinned: int = 0, evicts_oldest: bool = False, patience_s: float = 1.0
) -> AdapterPlaces:
    made = AdapterPlaces(num_slots, evicts_oldest, patience_s)
    for adapter_id in range(1, 6):
        load = LoadAdapter(adapter_id, "", adapter_id == pinned)
        assert made.change(WeightCall(0, load), Ranks(), []).success
    return made


def use(made: AdapterPlaces, adapter_id: int) -> int:
    """Run a request from beginning to end; return its slot."""
    one = request(100 + adapter_id, adapter_id)
    assert made.admits(one)
    made.take(one)
    slot = one.adapter_slot
    made.leave(one)
    assert one.adapter_slot == -1
    return slot


@pytest.mark.parametrize(("evicts_oldest", "leaves"), [(False, 1), (True, 0)])
def test_who_makes_room(evicts_oldest: bool, leaves: int) -> None:
    made = places(2, evicts_oldest=evicts_oldest)
    assert [use(made, 1), use(made, 2), use(made, 1)] == [0, 1, 0]
    assert [(copy.slot, copy.adapter_id) for copy in made.take_copies()] == [(0, 1), (1, 2)]
    assert use(made, 3) == leaves
    assert [(copy.slot, copy.adapter_id) for copy in made.take_copies()] == [(leaves, 3)]


def test_a_pinned_adapter_stays() -> None:
    made = places(2, pinned=1)
    first = use(made, 1)
    assert first not in {use(made, adapter_id) for adapter_id in (2, 3, 4, 5, 2)}
    made.take_copies()
    assert use(made, 1) == first
    assert not made.take_copies()


def test_a_slot_in_use_is_not_given_away() -> None:
    made = places(1)
    running = request(1, 1)
    assert made.admits(running)
    made.take(running)
    assert not made.admits(request(2, 2))
    assert made.admits(request(3, 1))
    assert made.admits(request(4, 0))
    unload = made.change(WeightCall(0, UnloadAdapter(1)), Ranks(), [running])
    assert not unload.success
    made.leave(running)
    assert made.change(WeightCall(0, UnloadAdapter(1)), Ranks(), []).success
    assert not made.has(1)


def test_no_request_is_overtaken_for_ever() -> None:
    made, waits = places(1), request(2, 2)
    running = request(1, 1)
    made.take(running)
    assert not made.admits(waits)
    assert made.admits(request(3, 1))
    made = places(1, patience_s=0.0)
    made.take(running)
    assert not made.admits(waits)
    assert not made.admits(request(4, 1)), "the slot must become free at last"
    assert made.admits(request(5, 0))
    made.leave(running)
    assert made.admits(waits)
    made.take(waits)
    assert waits.adapter_slot == 0
