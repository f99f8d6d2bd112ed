"""Structured output in the front process: sends constraints to the compiler, caches the results."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from runtime.config.options import GrammarConfig
from runtime.errors import EngineDead, InvalidRequest, Overloaded
from runtime.grammar.cache import ByteCache
from runtime.grammar.limits import check_grammar
from runtime.ipc.messages import (
    CompileGrammar,
    GrammarInbound,
    GrammarReply,
    GrammarsUnavailable,
)
from runtime.ipc.process import Child
from runtime.ipc.transport import Outbox, grammar_address
from runtime.requests.sampling_params import GrammarSpec

logger = logging.getLogger(__name__)

MAX_WAITING = 256
_MAX_ATTEMPTS = 2
_KILLED_WITH_IT = "The process that compiles grammars died; please send the request again."


def grammar_key(spec: GrammarSpec) -> bytes:
    """Return the key of a constraint in caches: a hash of its content."""
    text = spec.text.encode("utf-8", "surrogatepass")
    form = f"{spec.kind}\0{spec.shows_special:d}"
    return hashlib.sha256(form.encode() + text).digest()


@dataclass
class _Call:
    key: bytes
    message: CompileGrammar
    future: asyncio.Future[bytes]
    attempts: int = 1


class GrammarCompiler:
    """Compiles constraints in a child process. Equal constraints are compiled once.

    The child starts with `start`, or with the first constraint after it has died.
    """

    def __init__(self, config: GrammarConfig, context: zmq.Context[Any]) -> None:
        """Prepare without starting the child process."""
        self._config = config
        self._context = context
        # The child's reply for each constraint. Refusals are kept too, so a constraint that is
        # slow to refuse costs its time only once.
        self._known: ByteCache[GrammarReply] = ByteCache(config.cache_bytes)
        self._calls: dict[int, _Call] = {}
        self._by_key: dict[bytes, asyncio.Future[bytes]] = {}
        self._ids = itertools.count(1)
        self._child: Child | None = None
        self._outbox: Outbox | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        # The reason why no constraint can be compiled; empty if constraints can be compiled.
        self._unavailable = ""
        self.num_restarts = 0

    @property
    def num_waiting(self) -> int:
        """Number of constraints that are being compiled or wait for it."""
        return len(self._calls)

    @property
    def pid(self) -> int | None:
        """The process id of the child; `None` if it does not run."""
        return self._child.pid if self._child is not None and self._child.is_alive else None

    @property
    def starts_at_once(self) -> bool:
        """Whether the child is to be started with the server."""
        return self._config.starts_at_once

    def start(self) -> None:
        """Start the child unless it is running."""
        if self._child is not None or self._stopping:
            return
        self._loop = asyncio.get_running_loop()
        address = grammar_address(Path(self._config.run_folder), self._config.generation)
        self._outbox = Outbox(self._context, address)
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._child = Child("grammar", self._config, self._exited_on_thread, environment)

    def compile(self, spec: GrammarSpec) -> tuple[bytes, asyncio.Future[bytes]]:
        """Return the key of a constraint and a future of its compiled form.

        The future fails with `InvalidRequest` when the constraint cannot be used, and with
        `Overloaded` when the machine was too busy to find out.

        Raises:
            InvalidRequest: the constraint is refused without compiling it.
            Overloaded: too many constraints are being compiled.
        """
        if self._unavailable:
            raise self._refusal(spec)
        key = grammar_key(spec)
        running = self._by_key.get(key)
        if running is not None:
            return key, running
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        known = self._known.get(key)
        if known is not None:
            _settle(future, known)
            return key, future
        check_grammar(spec)
        if len(self._calls) >= MAX_WAITING:
            raise Overloaded("Too many grammars are being compiled.")
        self.start()
        call = _Call(key, CompileGrammar(next(self._ids), spec), future)
        self._calls[call.message.call_id] = call
        self._by_key[key] = future
        self._send(call)
        return key, future

    def _send(self, call: _Call) -> None:
        if self._outbox is not None:
            self._outbox.send(call.message)

    def on_reply(self, reply: GrammarInbound) -> None:
        """Handle a reply of the child: complete the waiting futures."""
        if isinstance(reply, GrammarsUnavailable):
            self._give_up(reply.reason)
            return
        call = self._calls.pop(reply.call_id, None)
        if call is None:
            return
        self._by_key.pop(call.key, None)
        if not reply.got_no_processor:
            size = len(reply.payload) + len(reply.error) + len(call.key)
            self._known.put(call.key, reply, size)
        _settle(call.future, reply)

    def _give_up(self, reason: str) -> None:
        self._unavailable = (
            "structured output is not available for this model: --grammar-backend "
            f"{self._config.backend} cannot work with its tokenizer ({reason.rstrip('.')})."
        )
        logger.warning("Requests get a 400 where %s", self._unavailable)
        for call in self._calls.values():
            _fail(call.future, self._refusal(call.message.grammar))
        self._calls.clear()
        self._by_key.clear()

    def _refusal(self, spec: GrammarSpec) -> InvalidRequest:
        return InvalidRequest(f"{spec.kind}: {self._unavailable}", param=spec.kind)

    def _exited_on_thread(self, child: Child, code: int) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # raised when the loop is closed
            self._loop.call_soon_threadsafe(self._exited, child, code)

    def _exited(self, child: Child, code: int) -> None:
        if self._stopping or child is not self._child:
            return
        if self._outbox is not None:
            self._outbox.close()
        self._child = None
        if code == 0:
            # Exit code 0 means that the child cannot compile any constraint for this model. Its
            # message about it may not have arrived yet.
            return
        logger.error("The grammar process ended with code %d; starting it again.", code)
        self.num_restarts += 1
        self._config = dataclasses.replace(self._config, generation=self._config.generation + 1)
        for call_id, call in list(self._calls.items()):
            call.attempts += 1
            if call.attempts > _MAX_ATTEMPTS:
                del self._calls[call_id]
                self._by_key.pop(call.key, None)
                _fail(call.future, EngineDead(_KILLED_WITH_IT))
        # Without waiting requests the child is not started here but by the next constraint, so a
        # child that cannot start is not retried forever.
        if self._calls:
            self.start()
            for call in self._calls.values():
                self._send(call)

    def stop(self) -> None:
        """End the child; may be called from any thread."""
        self._stopping = True
        if self._child is not None:
            self._child.stop()

    def close(self) -> None:
        """Close the socket and fail every waiting request."""
        self._stopping = True
        if self._outbox is not None:
            self._outbox.close()
        for call in self._calls.values():
            _fail(call.future, EngineDead("The server was stopped."))
        self._calls.clear()
        self._by_key.clear()


def _settle(future: asyncio.Future[bytes], reply: GrammarReply) -> None:
    if reply.got_no_processor:
        _fail(future, Overloaded(reply.error))
    elif reply.error:
        _fail(future, InvalidRequest(reply.error, param=reply.error.split(" ", 1)[0]))
    elif not future.done():
        future.set_result(reply.payload)


def _fail(future: asyncio.Future[bytes], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Retrieving the exception keeps asyncio from logging it if the waiting request is gone.
        future.exception()
