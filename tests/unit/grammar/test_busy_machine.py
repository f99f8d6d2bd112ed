"""A grammar that the machine had no time for is not refused for good; one that takes long is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from runtime.client.grammar_client import GrammarCompiler
from runtime.config.options import GrammarConfig
from runtime.errors import InvalidRequest, Overloaded
from runtime.grammar.compiler import Job
from runtime.ipc.messages import CompileGrammar, GrammarReply
from runtime.requests.sampling_params import GrammarSpec
from tests.support.waiting import until

SPEC = GrammarSpec("regex", "[0-9]{2}")
TIMEOUT_S = 1.0


def sleep(*_: object) -> None:
    threading.Event().wait(60)


def compute(*_: object) -> None:
    while True:
        pass


@pytest.mark.parametrize("compile_and_exit", [sleep, compute])
def test_who_did_not_run_says_nothing_of_the_grammar(
    compile_and_exit: Callable[..., None],
) -> None:
    config = SimpleNamespace(compile_timeout_s=TIMEOUT_S)
    compiler: Any = SimpleNamespace(config=config, compile_and_exit=compile_and_exit)
    job = Job(CompileGrammar(7, SPEC), compiler)
    # Of the process's own time, as the machine may have no more for it just now.
    until(lambda: compile_and_exit is sleep or processor_s(job.pid) >= TIMEOUT_S / 2)
    reply = job.end(timed_out=True)
    assert reply.call_id == 7
    assert not reply.payload
    assert reply.got_no_processor == (compile_and_exit is sleep)
    assert ("busy" if compile_and_exit is sleep else "too long") in reply.error


def processor_s(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


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
