"""Requests whose process dies: held, sent again from what their readers have, or ended."""

from __future__ import annotations

import array
from dataclasses import dataclass

import pytest

from runtime.client.client import EngineClient
from runtime.client.generation_stream import GenerationStream
from runtime.errors import EngineDead
from runtime.ipc.messages import (
    AbortRequests,
    FinishReason,
    GenerateRequest,
    SchedulerInbound,
    TextDelta,
    TextDeltas,
)
from tests.unit.test_client import LIMITS, request

WHY = "The worker died."


@dataclass
class Front:
    """A client and what each of its replicas was sent."""

    client: EngineClient
    sent: list[list[SchedulerInbound]]

    def requests(self, rank: int = 0) -> list[GenerateRequest]:
        return [each for each in self.sent[rank] if isinstance(each, GenerateRequest)]

    def die(self, rank: int = 0, *, keeps_weights: bool = True, counts: bool = True) -> None:
        self.client.links[rank].ready = False
        self.client.interrupt(rank, WHY, keeps_weights=keeps_weights, counts=counts)

    def come_back(self, rank: int = 0) -> None:
        self.sent[rank] = []
        self.client.links[rank].connect(self.sent[rank].append)
        self.client.links[rank].ready = True
        self.client.resume()

    def say(
        self, request_id: int, text: str, ids: list[int], reason: FinishReason | None = None
    ) -> None:
        delta = TextDelta(request_id, text, array.array("i", ids).tobytes(), reason)
        self.client.on_deltas(TextDeltas([delta]))


def front(dp_size: int = 1, max_resumes: int = 2) -> Front:
    client = EngineClient(LIMITS, dp_size=dp_size, max_resumes=max_resumes)
    made = Front(client, [[] for _ in range(dp_size)])
    for rank in range(dp_size):
        made.come_back(rank)
    return made


async def read(stream: GenerationStream) -> tuple[str, list[int]]:
    text, ids = "", []
    async for chunk in stream:
        text, ids = text + chunk.text, ids + chunk.token_ids
    return text, ids


async def test_a_stream_goes_on_after_what_its_reader_has() -> None:
    one = front()
    stream = one.client.generate(request())
    (first,) = one.requests()
    assert first.spec.sampling.seed is not None
    one.say(first.request_id, "ab", [5, 6])
    one.die()
    # What the dead process had sent comes late; it is computed again.
    one.say(first.request_id, "c", [7])
    one.come_back()
    (again,) = one.requests()
    assert again.request_id != first.request_id
    assert (again.input_ids, again.spec) == (first.input_ids, first.spec)
    assert again.is_resumed
    assert (list(array.array("i", again.output_ids)), again.num_shown) == ([5, 6], 2)
    one.say(again.request_id, "c", [7], FinishReason("length", length=3))
    assert await read(stream) == ("abc", [5, 6, 7])
    assert one.client.num_in_flight == 0
    assert one.client.links[0].num_in_flight == 0
    assert one.client.outgoing.num_resumed == 1


@pytest.mark.parametrize("max_resumes", [0, 1, 2])
async def test_one_death_too_many_ends_it(max_resumes: int) -> None:
    one = front(max_resumes=max_resumes)
    stream = one.client.generate(request())
    for _ in range(max_resumes):
        one.die()
        one.come_back()
        assert len(one.requests()) == 1
    one.die()
    with pytest.raises(EngineDead, match="The worker died"):
        await anext(stream)
    one.come_back()
    assert not one.requests()
    assert one.client.num_in_flight == 0


async def test_what_dies_while_it_starts_counts_too() -> None:
    one = front(max_resumes=2)
    stream = one.client.generate(request())
    for _ in range(3):
        one.die()
    with pytest.raises(EngineDead):
        await anext(stream)


async def test_a_restart_on_purpose_counts_as_no_death() -> None:
    one = front(max_resumes=1)
    stream = one.client.generate(request())
    for _ in range(3):
        one.die(counts=False)
        one.come_back()
    (last,) = one.requests()
    one.say(last.request_id, "x", [5], FinishReason("stop"))
    assert await read(stream) == ("x", [5])


async def test_other_weights_do_not_continue_an_output() -> None:
    one = front()
    stream = one.client.generate(request())
    one.die(keeps_weights=False)
    with pytest.raises(EngineDead, match="send the request again"):
        await anext(stream)


async def test_an_end_that_has_arrived_is_an_end() -> None:
    one = front(max_resumes=0)
    stream = one.client.generate(request())
    one.say(one.requests()[0].request_id, "x", [5], FinishReason("stop"))
    one.die()
    assert await read(stream) == ("x", [5])


async def test_another_replica_takes_over_at_once() -> None:
    both = front(dp_size=2)
    streams = [both.client.generate(request(name)) for name in "abcd"]
    ranks = [stream.dp_rank for stream in streams]
    assert set(ranks) == {0, 1}
    before = len(both.requests(1))
    both.die(0)
    assert len(both.requests(1)) == before + ranks.count(0)
    assert {stream.dp_rank for stream in streams} == {1}
    assert [link.num_in_flight for link in both.client.links] == [0, 4]
    for stream in streams:
        stream.close()
    assert [link.num_in_flight for link in both.client.links] == [0, 0]


async def test_an_abort_finds_what_is_held() -> None:
    one = front()
    stream = one.client.generate(request("a"))
    one.say(one.requests()[0].request_id, "x", [5])
    one.die()
    assert one.client.abort("a") == 1
    chunk = await anext(stream)
    assert chunk.finish_reason is not None
    assert chunk.finish_reason.type == "abort"
    one.come_back()
    assert not one.requests()


async def test_an_abort_finds_what_went_on() -> None:
    one = front()
    stream = one.client.generate(request("a"))
    one.die()
    one.come_back()
    (again,) = one.requests()
    stream.close()
    assert one.sent[0][-1] == AbortRequests([again.request_id])
    assert one.client.num_in_flight == 0


async def test_what_waits_at_the_gate_loses_nothing() -> None:
    one = front(max_resumes=0)
    one.client.gate.close("pause")
    stream = one.client.generate(request())
    one.die()
    one.client.gate.open("pause")
    assert one.client.outgoing.num_waiting == 1
    one.come_back()
    (sent,) = one.requests()
    assert not sent.is_resumed
    one.say(sent.request_id, "x", [5], FinishReason("stop"))
    assert await read(stream) == ("x", [5])


async def test_an_output_that_waits_is_lost_with_its_weights() -> None:
    one = front()
    begun, new = one.client.generate(request("a")), one.client.generate(request("b"))
    one.say(one.requests()[0].request_id, "x", [5])
    await anext(begun)
    # Its detokenizer, then its worker.
    one.die()
    one.die(keeps_weights=False)
    with pytest.raises(EngineDead):
        await anext(begun)
    one.come_back()
    (sent,) = one.requests()
    one.say(sent.request_id, "y", [6], FinishReason("stop"))
    assert await read(new) == ("y", [6])


async def test_a_request_during_a_planned_restart_waits() -> None:
    one = front()
    one.client.holds_requests = True
    one.die(counts=False)
    stream = one.client.generate(request())
    assert one.client.outgoing.num_waiting == 1
    one.come_back()
    (sent,) = one.requests()
    assert not sent.is_resumed
    one.say(sent.request_id, "x", [5], FinishReason("stop"))
    assert await read(stream) == ("x", [5])
