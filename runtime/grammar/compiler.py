"""The compiler process: every grammar is compiled in a fork of its own, killed when it is slow.

A library that crashes, hangs or eats memory on a hostile grammar takes one fork with it. The fork
starts with the library loaded, so a small grammar takes some ten milliseconds.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import zmq

from runtime.config.options import GrammarConfig
from runtime.grammar.grammar_backend import GRAMMAR_BACKENDS, GrammarBackend, GrammarError
from runtime.grammar.probe import probe
from runtime.ipc.logging import configure_logging
from runtime.ipc.messages import CompileGrammar, GrammarReply, GrammarsUnavailable
from runtime.ipc.transport import Inbox, Outbox, front_address, grammar_address

logger = logging.getLogger(__name__)

MAX_COMPILED_BYTES = 32 * 2**20
MAX_MEMORY_BYTES = 2 * 2**30
# Streams come first.
NICENESS = 10
_IDLE_WAIT_MS = 1000
_LAST_MESSAGE_MS = 5000
_MAX_REASON_CHARS = 300
_READ_BYTES = 1 << 20
_COMPILED, _REFUSED = b"+", b"-"
# Of the time it was given: a fork that ran for less says nothing of its grammar.
_LEAST_SHARE = 0.25


class Job:
    """A fork that compiles, and the pipe it answers through."""

    def __init__(self, message: CompileGrammar, compiler: _Compiler) -> None:
        self.message = message
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            compiler.compile_and_exit(message, writer)
        os.close(writer)
        self._timeout_s = compiler.config.compile_timeout_s
        self.deadline = time.monotonic() + self._timeout_s
        self._parts: list[bytes] = []

    def read(self) -> bool:
        """Take what has come; whether that was all."""
        part = os.read(self.reader, _READ_BYTES)
        if part:
            self._parts.append(part)
        return not part

    def end(self, *, timed_out: bool) -> GrammarReply:
        """Collect the process and say what came out."""
        # Whatever it does behind its answer must not keep this process waiting.
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.reader)
        _, status, usage = os.wait4(self.pid, 0)
        answer = b"".join(self._parts)
        call_id, kind = self.message.call_id, self.message.grammar.kind
        if timed_out and usage.ru_utime + usage.ru_stime < _LEAST_SHARE * self._timeout_s:
            error = f"The machine was too busy to compile the {kind}; please try again."
            return GrammarReply(call_id, error=error, got_no_processor=True)
        if timed_out:
            error = "compiling it takes too long"
        elif answer[:1] == _COMPILED:
            return GrammarReply(call_id, payload=answer[1:])
        elif answer[:1] == _REFUSED:
            error = answer[1:].decode(errors="replace")
        else:
            logger.warning("A fork that compiled a %s ended with status %d", kind, status)
            error = "the compiler cannot cope with it"
        return GrammarReply(call_id, error=f"{kind} cannot be used: {error}.")


class _Compiler:
    def __init__(self, config: GrammarConfig) -> None:
        self.config = config
        self.backend: GrammarBackend[Any] = GRAMMAR_BACKENDS.load(config.backend)(
            Path(config.tokenizer_folder), config.vocab_size, config.eos_token_ids
        )

    def compile_and_exit(self, message: CompileGrammar, writer: int) -> None:
        """Compile in a fork, answer, and leave without any clean-up of the parent's things."""
        try:
            _limit_resources(self.config.compile_timeout_s)
            answer = self._compile(message)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)

    def _compile(self, message: CompileGrammar) -> bytes:
        try:
            payload = self.backend.compile(message.grammar)
            if len(payload) > MAX_COMPILED_BYTES:
                raise GrammarError("it is too large once compiled")
            probe(self.backend, payload, self.config.vocab_size, self.config.eos_token_ids)
        except GrammarError as error:
            return _REFUSED + str(error).encode()
        except MemoryError:
            return _REFUSED + b"compiling it takes too much memory"
        return _COMPILED + payload


def _limit_resources(timeout_s: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Should the parent be killed, nobody else would end this process.
    seconds = int(timeout_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(payload: bytes) -> None:
    """Run the compiler with an encoded `GrammarConfig`."""
    config = msgspec.msgpack.decode(payload, type=GrammarConfig)
    configure_logging(config.log_level, "grammar")
    os.nice(NICENESS)
    folder = Path(config.run_folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[CompileGrammar] = Inbox(
        context, grammar_address(folder, config.generation), CompileGrammar
    )
    front = Outbox(context, front_address(folder))
    try:
        compiler = _Compiler(config)
    # Whatever the libraries raise: their panics are no `Exception`.
    except BaseException as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
        front.send(GrammarsUnavailable(reason))
        front.close(_LAST_MESSAGE_MS)
        context.term()
        return
    # Forks share what is here: the collector must not touch it.
    gc.collect()
    gc.freeze()
    _serve(compiler, inbox, front)


def _serve(compiler: _Compiler, inbox: Inbox[CompileGrammar], front: Outbox) -> None:
    poller = zmq.Poller()
    inbox.register(poller)
    waiting: deque[CompileGrammar] = deque()
    jobs: dict[int, Job] = {}
    while True:
        now = time.monotonic()
        next_deadline = min((job.deadline for job in jobs.values()), default=None)
        wait_ms = _IDLE_WAIT_MS
        if next_deadline is not None:
            wait_ms = max(0, int((next_deadline - now) * 1000) + 1)
        ready = {place for place, _ in poller.poll(wait_ms) if isinstance(place, int)}
        waiting.extend(inbox.drain())
        now = time.monotonic()
        for job in list(jobs.values()):
            ended = job.reader in ready and job.read()
            timed_out = not ended and now >= job.deadline
            if ended or timed_out:
                poller.unregister(job.reader)
                del jobs[job.reader]
                front.send(job.end(timed_out=timed_out))
        while waiting and len(jobs) < compiler.config.max_parallel:
            job = Job(waiting.popleft(), compiler)
            jobs[job.reader] = job
            poller.register(job.reader, zmq.POLLIN)
