"""What the front keeps of requests: system messages have a bound of their own."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.client.request_history import RequestHistory, RequestTrace
from runtime.ipc.messages import GenerateRequest
from runtime.ipc.time_messages import PrefixBreak, WorkerTimes
from runtime.requests.arrival import ARRIVAL, Arrival
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.service.explain_request import explain_request

SPEC = RequestSpec(row=RowSpec(sampling=SamplingParams()))
# Characters of all system messages that are kept, and what the traces take besides.
MOST_BYTES = 2**22 + 2**20


@pytest.fixture(autouse=True)
def _arrivals() -> Iterator[None]:
    token = ARRIVAL.set(None)
    yield
    ARRIVAL.reset(token)


def begun(history: RequestHistory, request_id: int) -> RequestTrace:
    request = GenerateRequest(request_id, bytes(400), SPEC)
    trace = RequestTrace(request, ("", str(request_id)), 100)
    history.begin(trace)
    return trace


def told(request_id: int, index: int = 20) -> WorkerTimes:
    return WorkerTimes(request_id, prefix=PrefixBreak(index, differs=True))


@pytest.mark.parametrize("ends_first", [True, False])
def test_long_system_messages_do_not_pile_up(ends_first: bool) -> None:
    history = RequestHistory()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for request_id in range(200):
        arrival = Arrival("id")
        ARRIVAL.set(arrival)
        arrival.system = f"{request_id:>100000}"
        trace = begun(history, request_id)
        # As at the end of each HTTP request; the worker tells its part then or later.
        arrival.system = ""
        if ends_first:
            history.end(trace, b"")
        history.on_times([told(request_id)])
        if not ends_first:
            history.end(trace, b"")
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used < MOST_BYTES
    assert history.system_of(trace).endswith("199")


def test_every_sample_has_the_system_message() -> None:
    history = RequestHistory()
    ARRIVAL.set(arrival := Arrival("id"))
    arrival.system = "You are a guide."
    traces = [begun(history, request_id) for request_id in range(3)]
    arrival.system = ""
    for trace in traces:
        history.on_times([told(trace.request_id)])
        history.end(trace, b"")
    assert [history.system_of(trace) for trace in traces] == ["You are a guide."] * 3


@pytest.mark.parametrize(
    ("is_recurrent", "num_cached", "name", "text"),
    [
        (False, 32, "new prompt text", "68 of 100 prompt tokens were computed."),
        (True, 32, "new prompt text", "68 of 100 prompt tokens were computed."),
        (True, 16, "new prompt text", "from the last snapshot of its states, at token 16."),
        (True, 0, "new prompt text", "from the last snapshot of its states, at token 0."),
        (False, 0, "cold cache", "No cached prompt begins like this one"),
    ],
)
async def test_a_hybrid_names_its_snapshot(
    is_recurrent: bool, num_cached: int, name: str, text: str
) -> None:
    history = RequestHistory()
    trace = begun(history, 1)
    times = told(1, 40 if num_cached or is_recurrent else 3)
    times.cached_tokens = num_cached
    times.admitted_at, times.prompt_done_at = trace.admitted_at, trace.admitted_at + 1e6
    history.on_times([times])
    context: Any = SimpleNamespace(
        client=SimpleNamespace(history=history),
        tokenizer=SimpleNamespace(is_missing=True),
        model=SimpleNamespace(is_recurrent=is_recurrent),
        config=SimpleNamespace(scheduling=SimpleNamespace(page_size=16)),
    )
    (explained,) = await explain_request(context, "1")
    (cause,) = explained["causes"]
    assert cause["name"] == name
    assert text in cause["text"]
