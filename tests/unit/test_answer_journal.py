"""Answers that another server goes on with: the journal, and the names that stay the same."""

from __future__ import annotations

import array
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from runtime.client.answer_journal import JOURNAL, AnswerJournal
from runtime.client.generation_stream import GenerationInput, GenerationStream
from runtime.ipc.messages import FinishReason, GenerateRequest
from runtime.requests.identity import IDENTITY, Identity, created_now
from runtime.requests.random_hex import random_hex
from runtime.service.generation import Generation, Indexed
from tests.unit.test_client import request
from tests.unit.test_outgoing import WHY, Front, front

END = FinishReason("length", length=9)


@contextmanager
def journaled(journal: AnswerJournal) -> Iterator[None]:
    token = JOURNAL.set(journal)
    yield
    JOURNAL.reset(token)


def open_two(server: Front, journal: AnswerJournal) -> list[GenerationStream]:
    with journaled(journal):
        return [server.client.generate(request(rid)) for rid in "ab"]


def seen(found: list[Indexed]) -> list[tuple[int, str, list[int], bool]]:
    return [
        (index, chunk.text, chunk.token_ids, chunk.finish_reason is not None)
        for index, chunk in found
    ]


async def first_server() -> tuple[list[bytes], list[GenerateRequest], list[Indexed]]:
    """Two samples, the second of which ends; return what was read of them."""
    server, journal = front(), AnswerJournal()
    chunks = Generation(open_two(server, journal)).chunks()
    requests = server.requests()
    one, two = (each.request_id for each in requests)
    found = []
    for request_id, text, ids, reason in [
        (two, "xy", [4], None),
        (one, "ab", [5, 6], None),
        (two, "z", [], END),
        (one, "", [7], None),
    ]:
        server.say(request_id, text, ids, reason)
        found.append(await anext(chunks))
    assert seen(found) == [
        (1, "xy", [4], False),
        (0, "ab", [5, 6], False),
        (1, "z", [], True),
        (0, "", [7], False),
    ]
    entries = journal.take_unsent()
    assert journal.take_unsent() == []
    return entries, requests, found


async def test_another_server_gives_the_same_chunks_and_goes_on() -> None:
    entries, before, found = await first_server()
    server, journal = front(), AnswerJournal(entries)
    chunks = Generation(open_two(server, journal)).chunks()
    # Nothing is computed before all is repeated, or new chunks would come between.
    assert server.requests() == []
    again = [await anext(chunks) for _ in range(4)]
    assert seen(again) == seen(found)
    # What is repeated is in the journal already.
    assert journal.take_unsent() == []
    (rest,) = server.requests()
    assert rest.is_resumed
    assert (list(array.array("i", rest.output_ids)), rest.num_shown) == ([5, 6, 7], 2)
    assert rest.spec.sampling.seed == before[0].spec.sampling.seed
    server.say(rest.request_id, "c", [8], END)
    assert seen([await anext(chunks)]) == [(0, "c", [8], True)]
    assert len(journal.take_unsent()) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(chunks)
    assert server.client.num_in_flight == 0
    assert server.client.outgoing.num_resumed == 1
    assert not server.client.outgoing.unsent


async def test_it_goes_on_after_each_chunk() -> None:
    entries, _, found = await first_server()
    # Two seeds, then four chunks.
    for num_entries in range(2, 7):
        server, journal = front(), AnswerJournal(entries[:num_entries])
        chunks = Generation(open_two(server, journal)).chunks()
        again = [await anext(chunks) for _ in range(num_entries - 2)]
        assert seen(again) == seen(found)[: num_entries - 2]
        assert len(server.requests()) == (2 if num_entries < 5 else 1)


async def test_an_abort_and_a_death_while_it_is_repeated() -> None:
    entries, _, _ = await first_server()
    server = front()
    streams = open_two(server, AnswerJournal(entries))
    assert server.client.abort("a") == 1
    # The other one is repeated none the less.
    assert [each.text async for each in streams[1]] == ["xy", "z"]
    (last,) = [each async for each in streams[0]]
    assert last.finish_reason is not None
    assert last.finish_reason.type == "abort"
    assert server.requests() == []

    server = front()
    chunks = Generation(open_two(server, AnswerJournal(entries))).chunks()
    await anext(chunks)
    server.client.interrupt(0, WHY, keeps_weights=True)
    again = [await anext(chunks) for _ in range(3)]
    assert len(again) == 3
    assert len(server.requests()) == 1


async def test_a_reader_that_leaves_while_it_is_repeated() -> None:
    entries, _, _ = await first_server()
    server = front()
    streams = open_two(server, AnswerJournal(entries))
    for each in streams:
        each.close()
    assert server.client.num_in_flight == 0
    assert server.requests() == []
    assert not server.client.outgoing.unsent


async def test_an_answer_that_is_not_streamed_keeps_its_seed_only() -> None:
    journal = AnswerJournal()
    server = front()
    asked = request()
    asked = GenerationInput(asked.input_ids, msgspec.structs.replace(asked.spec, stream=False))
    with journaled(journal):
        stream = server.client.generate(asked)
    (sent,) = server.requests()
    server.say(sent.request_id, "x", [5], END)
    await anext(stream)
    entries = journal.take_unsent()
    assert len(entries) == 1
    with journaled(AnswerJournal(entries)):
        server.client.generate(asked)
    assert server.requests()[1].spec.sampling.seed == sent.spec.sampling.seed


def test_names_and_time_are_those_of_the_identity() -> None:
    def names() -> list[object]:
        token = IDENTITY.set(Identity(b"k" * 16, 1234))
        try:
            return [created_now(), random_hex(16), random_hex(16), random_hex(4)]
        finally:
            IDENTITY.reset(token)

    assert names() == names()
    assert names()[0] == 1234
    assert len(set(names())) == 4
    assert random_hex(16) != random_hex(16)
