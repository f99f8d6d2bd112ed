"""A grammar that failed on a busy machine is tried again; one that takes too long is refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from runtime.client.grammar_client import GrammarCompiler
from runtime.config.options import GrammarConfig
from runtime.errors import InvalidRequest, Overloaded
from runtime.grammar.compiler import reply_to
from runtime.grammar.libraries import open_libraries
from runtime.ipc.limited_forks import ForkEnd, ForkLimits, LimitedForks
from runtime.ipc.messages import CompileGrammar, GrammarReply, GrammarsUnavailable
from runtime.requests.sampling_params import GrammarSpec
from tests.support.grammar_backends import BACKENDS, needs_grammars

SPEC = GrammarSpec("regex", "[0-9]{2}")
TIMEOUT_S = 0.5


def sleep(duration_s: float = 60) -> bytes:
    time.sleep(duration_s)
    return b"done"


def compute() -> bytes:
    while True:
        pass


def end_of(
    work: Callable[[], bytes], timeout_s: float = TIMEOUT_S, patience_s: float = 0
) -> ForkEnd:
    forks, ends = LimitedForks(zmq.Poller(), 1), list[ForkEnd]()
    forks.add(work, ForkLimits(timeout_s, timeout_s, 2**30, patience_s), ends.append)
    while not ends:
        forks.turn()
    return ends[0]


@pytest.mark.parametrize("work", [sleep, compute])
def test_who_did_not_run_says_nothing_of_the_grammar(work: Callable[[], bytes]) -> None:
    # A busy machine may have little time for work that computes.
    end = end_of(work, patience_s=200 if work is compute else 0)
    reply = reply_to(CompileGrammar(7, SPEC), end)
    assert reply.call_id == 7
    assert not reply.payload
    assert reply.got_no_processor == (work is sleep)
    assert ("busy" if work is sleep else "too long") in reply.error


def test_what_could_hardly_run_gets_more_time() -> None:
    """A fork that sleeps stands for one that waits for a processor."""
    began = time.monotonic()
    assert end_of(lambda: sleep(2.5 * TIMEOUT_S), patience_s=200).answer == b"done"
    end = end_of(sleep, patience_s=2 * TIMEOUT_S)
    assert (end.timed_out, end.got_no_processor) == (True, True)
    assert time.monotonic() - began >= 4.5 * TIMEOUT_S


def fill_memory() -> bytes:
    return bytes(2**31)


def crash() -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b"not reached"


def test_what_a_fork_may_use_is_bounded() -> None:
    end = end_of(lambda: b"done", 120)
    assert (end.answer, end.timed_out) == (b"done", False)
    for work in (fill_memory, crash):
        end = end_of(work, 120)
        assert not end.answer
        assert not end.timed_out


def test_so_many_at_a_time_in_order() -> None:
    forks, ends = LimitedForks(zmq.Poller(), 2), list[bytes]()
    for number in range(20):
        forks.add(
            lambda number=number: b"%d" % number,  # type: ignore[misc]
            ForkLimits(60.0, 60.0, 2**30),
            lambda end: ends.append(end.answer),
        )
    while len(ends) < 20:
        forks.turn()
    assert sorted(map(int, ends)) == list(range(20))


@pytest.mark.asyncio
@pytest.mark.parametrize("got_no_processor", [True, False])
async def test_only_what_the_grammar_is_like_is_remembered(
    got_no_processor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(config(), None)  # type: ignore[arg-type]
    sent: list[CompileGrammar] = []
    monkeypatch.setattr(compiler, "start", lambda: None)
    monkeypatch.setattr(compiler, "_outbox", SimpleNamespace(send=sent.append))
    for number in (1, 2):
        _, future = compiler.compile(SPEC)
        if len(sent) == number:
            message = sent[-1]
            error = "regex cannot be used."
            compiler.on_reply(
                GrammarReply(message.call_id, error=error, got_no_processor=got_no_processor)
            )
        with pytest.raises(Overloaded if got_no_processor else InvalidRequest):
            await future
    assert len(sent) == (2 if got_no_processor else 1)


@needs_grammars
@pytest.mark.asyncio
async def test_where_no_library_can_work_every_constraint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="tokenizer") as caught:
        open_libraries(BACKENDS[0], tmp_path, 8, [])
    compiler = GrammarCompiler(config(), None)  # type: ignore[arg-type]
    compiler.on_reply(GrammarsUnavailable(str(caught.value)))
    with pytest.raises(InvalidRequest, match="regex: structured output is not available"):
        compiler.compile(SPEC)


def config() -> GrammarConfig:
    return GrammarConfig(
        run_folder="",
        generation=0,
        backend="none",
        tokenizer_folder="",
        vocab_size=8,
        eos_token_ids=[],
        log_level="info",
    )
