"""The client over two replicas: control messages go to both, and a death affects one."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import numpy as np
import pytest

from runtime.client.admission import EngineLimits
from runtime.client.client import EngineClient
from runtime.client.generation_stream import GenerationInput
from runtime.errors import EngineDead, EngineNotReady, InvalidRequest
from runtime.ipc.messages import (
    AbortAll,
    AbortRequests,
    ControlReply,
    FinishReason,
    FlushCache,
    GenerateRequest,
    MatchPrefix,
    PrefixReport,
    SchedulerInbound,
    TextDelta,
    TextDeltas,
)
from runtime.requests.image_input import ImageInput, PreparedImage
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from tests.support.pictures import PATCHES

LIMITS = EngineLimits(context_len=64, max_total_num_tokens=1024, vocab_size=32)


class TwoReplicas:
    """A client and what each replica was sent."""

    def __init__(self) -> None:
        self.client = EngineClient(LIMITS, dp_size=2)
        self.sent: list[list[SchedulerInbound]] = [[], []]
        for link, sent in zip(self.client.links, self.sent, strict=True):
            link.connect(sent.append)
        self.client.ready = True

    def generate(self, rid: str, dp_rank: int | None = None):  # type: ignore[no-untyped-def]
        return self.client.generate(
            GenerationInput(
                [1, 2],
                RequestSpec(
                    row=RowSpec(sampling=SamplingParams(max_new_tokens=4)),
                    rid=rid,
                    stream=True,
                    dp_rank=dp_rank,
                ),
            )
        )

    async def flush_calls(self) -> tuple[asyncio.Task[ControlReply], int]:
        task = asyncio.create_task(self.client.calls.flush_cache(timeout_s=5.0))
        await asyncio.sleep(0)
        first, second = (sent[-1] for sent in self.sent)
        assert isinstance(first, FlushCache)
        assert first == second
        return task, first.call_id


async def test_a_control_call_waits_for_every_replica() -> None:
    both = TwoReplicas()
    task, call_id = await both.flush_calls()
    both.client.calls.on_reply(1, ControlReply(call_id, True, "one"))
    both.client.calls.on_reply(1, ControlReply(call_id, True, "again"))
    await asyncio.sleep(0)
    assert not task.done()
    both.client.calls.on_reply(0, ControlReply(call_id, True, "zero"))
    assert await task == ControlReply(call_id, True, "zero")


async def test_one_failure_is_the_answer() -> None:
    both = TwoReplicas()
    task, call_id = await both.flush_calls()
    both.client.calls.on_reply(0, ControlReply(call_id, True))
    both.client.calls.on_reply(1, ControlReply(call_id, False, "busy"))
    assert await task == ControlReply(call_id, False, "busy", is_partial=True)
    task, call_id = await both.flush_calls()
    both.client.calls.on_reply(0, ControlReply(call_id, True))
    both.client.interrupt(1, "It died.", keeps_weights=True)
    assert await task == ControlReply(call_id, False, "It died.", is_partial=True)
    task, call_id = await both.flush_calls()
    for rank in (0, 1):
        both.client.calls.on_reply(rank, ControlReply(call_id, False, f"busy {rank}"))
    assert await task == ControlReply(call_id, False, "busy 0")


async def test_a_replica_that_says_nothing_is_a_failure() -> None:
    both = TwoReplicas()
    task = asyncio.create_task(both.client.calls.flush_cache(timeout_s=0.05))
    await asyncio.sleep(0)
    call = both.sent[0][-1]
    assert isinstance(call, FlushCache)
    both.client.calls.on_reply(0, ControlReply(call.call_id, True))
    reply = await task
    assert not reply.success
    assert "did not answer" in reply.message
    # What comes late is nobody's.
    both.client.calls.on_reply(1, ControlReply(call.call_id, True))


async def test_a_prefix_is_looked_for_in_every_replica_that_is_ready() -> None:
    both = TwoReplicas()
    task = asyncio.create_task(both.client.calls.match_prefix([1, 2, 3], "mine"))
    await asyncio.sleep(0)
    first, second = (sent[-1] for sent in both.sent)
    assert isinstance(first, MatchPrefix)
    assert first == second
    assert (np.frombuffer(first.input_ids, np.int32).tolist(), first.namespace) == (
        [1, 2, 3],
        "mine",
    )
    reports = [PrefixReport(1, 0, True), PrefixReport(3, 2, False)]
    for rank, report in enumerate(reports):
        data = msgspec.msgpack.encode(report)
        both.client.calls.on_reply(rank, ControlReply(first.call_id, True, data=data))
    assert await task == reports[1]
    # One that is being started again holds nobody up.
    both.client.links[1].ready = False
    task = asyncio.create_task(both.client.calls.match_prefix([1, 2, 3], ""))
    await asyncio.sleep(0)
    asked = both.sent[0][-1]
    assert isinstance(asked, MatchPrefix)
    assert both.sent[1][-1] is second
    data = msgspec.msgpack.encode(reports[0])
    both.client.calls.on_reply(0, ControlReply(asked.call_id, True, data=data))
    assert await task == reports[0]
    both.client.ready = False
    with pytest.raises(EngineNotReady):
        await both.client.calls.match_prefix([1], "")


def test_requests_are_shared_out_by_their_pictures() -> None:
    both = TwoReplicas()
    both.client.limits = dataclasses.replace(LIMITS, vision=PATCHES)

    def rank_of(picture: int) -> int:
        image = PreparedImage(bytes([picture]) * 16, (3, 28, 56), 2, b"")
        spec = RequestSpec(
            row=RowSpec(sampling=SamplingParams(max_new_tokens=4)),
            images=[ImageInput(0, image)],
            rid="a",
        )
        ids = [PATCHES.image_token_id] * 2 + [1] * 30
        stream = both.client.generate(GenerationInput(ids, spec))
        stream.close()
        return stream.dp_rank

    home = rank_of(1)
    assert rank_of(2) != home
    assert [rank_of(picture) for picture in (1, 1, 2, 2)] == [home, home, 1 - home, 1 - home]


async def test_control_needs_every_replica() -> None:
    both = TwoReplicas()
    both.client.links[1].ready = False
    with pytest.raises(EngineNotReady):
        await both.client.calls.flush_cache()
    assert both.sent == [[], []]


async def test_a_death_fails_the_requests_of_one_replica() -> None:
    both = TwoReplicas()
    streams = [both.generate("a", 0), both.generate("b", 1)]
    assert [stream.dp_rank for stream in streams] == [0, 1]
    both.client.links[0].ready = False
    both.client.interrupt(0, "It died.", keeps_weights=True)
    with pytest.raises(EngineDead, match="It died"):
        await anext(streams[0])
    (request,) = both.sent[1]
    assert isinstance(request, GenerateRequest)
    delta = TextDelta(request.request_id, "x", b"", FinishReason("length", length=4))
    both.client.on_deltas(TextDeltas([delta]))
    assert (await anext(streams[1])).text == "x"
    assert [link.num_in_flight for link in both.client.links] == [0, 0]
    # Until it is back everything goes to the other one, and asking for it is told.
    assert {both.generate(f"c{each}").dp_rank for each in range(4)} == {1}
    with pytest.raises(EngineNotReady, match="Replica 0"):
        both.generate("d", 0)
    both.client.links[1].ready = False
    with pytest.raises(EngineNotReady):
        both.generate("e")


async def test_an_abort_reaches_the_replica_that_runs_the_request() -> None:
    both = TwoReplicas()
    for rid, rank in (("a_0", 0), ("a_1", 1), ("b", 1)):
        both.generate(rid, rank)
    assert both.client.abort("b") == 1
    assert [type(each) for each in both.sent[0]] == [GenerateRequest]
    assert both.client.abort("a") == 2
    for sent in both.sent:
        assert isinstance(sent[-1], AbortRequests)
        assert len(sent[-1].request_ids) == 1
    both.client.abort_all("Enough")
    assert [sent[-1] for sent in both.sent] == [AbortAll("Enough")] * 2


def test_a_rank_that_is_not_there_is_refused() -> None:
    both = TwoReplicas()
    for rank in (2, -2, 10**9):
        with pytest.raises(InvalidRequest, match=r"data_parallel_rank must be in \[0, 2\)"):
            both.generate("a", rank)
    assert both.client.num_in_flight == 0
