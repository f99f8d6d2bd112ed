"""An error in one stream ends only that stream; other streams and the process continue."""

from __future__ import annotations

import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from runtime.ipc.messages import (
    DetokenizerInbound,
    FinishReason,
    FrontInbound,
    SchedulerInbound,
    StopHit,
    StreamEnd,
    StreamStart,
    TextDelta,
    TextDeltas,
    TokenDeltas,
)
from runtime.ipc.transport import Inbox, Outbox
from runtime.requests.extra_spec import ExtraBlock
from runtime.text.detokenizer import Detokenizer
from runtime.text.detokenizer_process import DetokenizerLoop
from runtime.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import llama3

TEXT = "The mill by the river grinds at night. " * 3
GUILTY, NEIGHBOURS = 2, (1, 3)
LENGTH = FinishReason("length", length=9)


class PlantedError(Exception):
    """What a part of a message raises."""


class Unwritable:
    """Data of an extra that has a length and no encoding."""

    def __len__(self) -> int:
        return 4


class Undecided:
    """A number of retractions that is neither some nor none."""

    def __bool__(self) -> bool:
        raise PlantedError


class Loop:
    """The process's loop in this one, between the ends of real sockets."""

    def __init__(self) -> None:
        tokenizer = Tokenizer(llama3(), {"eos_token": "</s>"})
        self.ids = tokenizer.encode(TEXT, add_special_tokens=False)
        self.detokenizer = Detokenizer(tokenizer)
        self.context: zmq.Context[Any] = zmq.Context()
        here = "inproc://{}".format
        inbox: Inbox[DetokenizerInbound] = Inbox(self.context, here("in"), DetokenizerInbound)
        self.front: Inbox[FrontInbound] = Inbox(self.context, here("front"), FrontInbound)
        self.scheduler: Inbox[SchedulerInbound] = Inbox(
            self.context, here("scheduler"), SchedulerInbound
        )
        to_front = Outbox(self.context, here("front"))
        to_scheduler = Outbox(self.context, here("scheduler"))
        self._loop = DetokenizerLoop(self.detokenizer, inbox, to_front, to_scheduler)
        self.text: dict[int, str] = {}
        self.reasons: dict[int, FinishReason] = {}

    def handle(self, message: TokenDeltas) -> None:
        # Not through its socket, which lets in only what is well formed.
        self._loop.handle(message)
        for each in self.front.drain():
            assert isinstance(each, TextDeltas)
            for delta in each.deltas:
                self._take(delta)

    def _take(self, delta: TextDelta) -> None:
        assert delta.request_id not in self.reasons, "a delta behind the last"
        self.text[delta.request_id] = self.text.get(delta.request_id, "") + delta.text
        if delta.reason is not None:
            self.reasons[delta.request_id] = delta.reason

    def hits(self) -> set[int]:
        found = [each for each in self.scheduler.drain() if isinstance(each, StopHit)]
        return {request_id for each in found for request_id in each.request_ids}


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.context.destroy(0)


def start(request_id: int) -> StreamStart:
    return StreamStart(request_id, True, [], True, True, False, 1, b"")


def message(
    tokens: dict[int, list[int]],
    *,
    begins: bool = False,
    extras: list[Any] | None = None,
    ends: list[Any] | None = None,
) -> TokenDeltas:
    starts = [start(request_id) for request_id in tokens] if begins else []
    data = b"".join(array.array("i", ids).tobytes() for ids in tokens.values())
    counts = [len(ids) for ids in tokens.values()]
    return TokenDeltas(starts, [0] * len(starts), [*tokens], counts, data, ends or [], extras or [])


def extra(data: Any) -> ExtraBlock:
    return ExtraBlock(GUILTY, "logprobs", False, data)


@pytest.mark.parametrize(
    "parts",
    [
        {"extras": [extra(None)]},
        {"extras": [extra(Unwritable())]},
        {"ends": [StreamEnd(GUILTY, LENGTH, Undecided())]},  # type: ignore[arg-type]
    ],
    ids=["an extra without data", "an extra that cannot be written", "an end"],
)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_one_stream_ends(loop: Loop, parts: dict[str, Any], has_tokens: bool) -> None:
    everyone = (1, GUILTY, 3)
    loop.handle(message(dict.fromkeys(everyone, loop.ids[:4]), begins=True))
    running = everyone if has_tokens else NEIGHBOURS
    loop.handle(message(dict.fromkeys(running, loop.ids[4:5]), **parts))
    # A step late the scheduler may still have one for it.
    loop.handle(message(dict.fromkeys(everyone, loop.ids[5:-1])))
    last = [StreamEnd(number, LENGTH) for number in everyone]
    loop.handle(message(dict.fromkeys(NEIGHBOURS, loop.ids[-1:]), ends=last))
    assert {loop.text[number] for number in NEIGHBOURS} == {TEXT}
    assert {loop.reasons[number] for number in NEIGHBOURS} == {LENGTH}
    assert loop.reasons[GUILTY].status_code == 500
    assert loop.hits() == {GUILTY}, "the scheduler goes on for nobody"


@pytest.mark.parametrize("is_lasting", [True, False], ids=["of one stream", "once"])
def test_a_failure_at_the_entry_of_a_step_ends_no_stream_but_its_own(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, is_lasting: bool
) -> None:
    everyone = (1, GUILTY, 3)
    loop.handle(message(dict.fromkeys(everyone, loop.ids[:4]), begins=True))
    step = loop.detokenizer.step
    calls = []

    def failing(asked: TokenDeltas) -> Any:
        calls.append(asked)
        if GUILTY in asked.request_ids and (is_lasting or len(calls) == 1):
            raise PlantedError
        return step(asked)

    monkeypatch.setattr(loop.detokenizer, "step", failing)
    running = dict.fromkeys(everyone, loop.ids[4:-1])
    loop.handle(message(running | {4: loop.ids[:-1]}, ends=[StreamEnd(4, LENGTH)]))
    last = [StreamEnd(number, LENGTH) for number in everyone]
    loop.handle(message(dict.fromkeys(NEIGHBOURS, loop.ids[-1:]), ends=last))
    assert {loop.text[number] for number in NEIGHBOURS} == {TEXT}
    assert {loop.reasons[number] for number in NEIGHBOURS} == {LENGTH}
    if is_lasting:
        assert loop.reasons[GUILTY].status_code == 500
        assert loop.hits() == {GUILTY}
    else:
        assert loop.reasons[GUILTY] == LENGTH
        assert not loop.hits()


def test_a_message_that_fails_as_a_whole_ends_those_that_it_names(loop: Loop) -> None:
    loop.handle(message({1: loop.ids[:4], 2: loop.ids[:4], 3: loop.ids[:4]}, begins=True))
    broken = message({1: loop.ids[4:5], 2: loop.ids[4:5]})
    loop.handle(msgspec.structs.replace(broken, token_counts=["one", "one"]))
    loop.handle(message({3: loop.ids[4:]}, ends=[StreamEnd(3, LENGTH)]))
    assert loop.text[3] == TEXT
    assert {loop.reasons[number].status_code for number in (1, 2)} == {500}
    assert loop.hits() == {1, 2}
