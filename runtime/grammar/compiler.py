"""The compiler process: compiles every grammar in a separate fork, and kills slow forks.

If a library crashes, hangs or fills the memory on a hostile grammar, only one fork ends.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import zmq

from runtime.config.options import GrammarConfig
from runtime.grammar.grammar_backend import GrammarBackend, GrammarError
from runtime.grammar.libraries import NotLoaded, open_libraries
from runtime.grammar.probe import probe
from runtime.ipc.freed_memory import return_freed_memory
from runtime.ipc.limited_forks import ForkEnd, ForkLimits, LimitedForks
from runtime.ipc.logging import configure_logging
from runtime.ipc.messages import CompileGrammar, GrammarReply, GrammarsUnavailable
from runtime.ipc.process import uncollected
from runtime.ipc.transport import Inbox, Outbox, front_address, grammar_address

logger = logging.getLogger(__name__)

MAX_COMPILED_BYTES = 32 * 2**20
MAX_MEMORY_BYTES = 2 * 2**30
# The process has a low priority, so that running requests are not delayed.
NICENESS = 10
# Time after which a compilation is given up if a busy machine hardly lets it run, seconds.
_PATIENCE_S = 20.0
_LAST_MESSAGE_MS = 5000
_MAX_REASON_CHARS = 300
_COMPILED, _REFUSED, _NEEDS_MORE = b"+", b"-", b"?"


class _Compiler:
    def __init__(self, config: GrammarConfig) -> None:
        self.config = config
        self.libraries = open_libraries(
            config.backend,
            Path(config.tokenizer_folder),
            config.vocab_size,
            config.eos_token_ids,
        )

    def compile(self, message: CompileGrammar) -> bytes:
        try:
            payload = self.libraries.compile(message.grammar, self._check, may_load=False)
        except NotLoaded:
            return _NEEDS_MORE
        except GrammarError as error:
            return _REFUSED + str(error).encode()
        except MemoryError:
            return _REFUSED + b"compiling it takes too much memory"
        return _COMPILED + payload

    def _check(self, library: GrammarBackend[Any], payload: bytes) -> None:
        if len(payload) > MAX_COMPILED_BYTES:
            raise GrammarError("it is too large once compiled")
        probe(library, payload, self.config.vocab_size, self.config.eos_token_ids)


def reply_to(message: CompileGrammar, end: ForkEnd) -> GrammarReply:
    """Return the reply to the front process about a fork that compiled a grammar.

    Args:
        message: the request of the front process.
        end: how the fork ended, and its answer.
    """
    call_id, kind = message.call_id, message.grammar.kind
    if end.got_no_processor:
        error = f"The machine was too busy to compile the {kind}; please try again."
        return GrammarReply(call_id, error=error, got_no_processor=True)
    if end.timed_out:
        error = "compiling it takes too long"
    elif end.answer[:1] == _COMPILED:
        return GrammarReply(call_id, payload=end.answer[1:])
    elif end.answer[:1] == _REFUSED:
        error = end.answer[1:].decode(errors="replace")
    else:
        logger.warning("A fork that compiled a %s ended with status %d", kind, end.status)
        error = "the compiler cannot cope with it"
    return GrammarReply(call_id, error=f"{kind} cannot be used: {error}.")


def main(payload: bytes) -> None:
    """Run the compiler's process; `payload` is an encoded `GrammarConfig`."""
    config = msgspec.msgpack.decode(payload, type=GrammarConfig)
    configure_logging(config.log_level, "grammar", config.log_format)
    os.nice(NICENESS)
    folder = Path(config.run_folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[CompileGrammar] = Inbox(
        context, grammar_address(folder, config.generation), CompileGrammar
    )
    front = Outbox(context, front_address(folder))
    try:
        # Forks share this memory as long as it is not written, so the garbage collector is off.
        with uncollected():
            compiler = _Compiler(config)
        return_freed_memory()
    # All errors are caught, because panics of the libraries are not `Exception`s.
    except BaseException as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
        front.send(GrammarsUnavailable(reason))
        front.close(_LAST_MESSAGE_MS)
        context.term()
        return
    _serve(compiler, inbox, front)


def _serve(compiler: _Compiler, inbox: Inbox[CompileGrammar], front: Outbox) -> None:
    poller = zmq.Poller()
    inbox.register(poller)
    timeout_s = compiler.config.compile_timeout_s
    limits = ForkLimits(timeout_s, timeout_s, MAX_MEMORY_BYTES, _PATIENCE_S)
    forks = LimitedForks(poller, compiler.config.max_parallel)

    def take(message: CompileGrammar) -> None:
        def reply(end: ForkEnd) -> None:
            if end.answer == _NEEDS_MORE:
                # The library is loaded in this process, so that later forks have it.
                with uncollected():
                    compiler.libraries.load_all()
                return_freed_memory()
                take(message)
                return
            front.send(reply_to(message, end))

        forks.add(lambda: compiler.compile(message), limits, reply)

    while True:
        forks.turn()
        for message in inbox.drain():
            take(message)
