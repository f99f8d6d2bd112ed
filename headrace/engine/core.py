"""The processes, the request client and the event loop of one engine, without public methods."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from headrace.engine.engine_errors import EngineDeadError, EngineError, translated
from headrace.engine.loop_thread import LoopClosed, LoopThread
from runtime.config.options import ServerConfig
from runtime.errors import EngineDead
from runtime.eventloop.background import Background
from runtime.launch.assemble import assemble
from runtime.launch.prepare import prepare_engine
from runtime.processes.engine_processes import EngineProcesses, watch
from runtime.service.context import ServiceContext

T = TypeVar("T")

_REIMPORTED = (
    "The engine is being created in a child process of your program, which imports your script "
    "again. Put the code that starts things under `if __name__ == '__main__':`. (The engine itself "
    "needs no such guard; `multiprocessing` does.)"
)

_numbers = itertools.count(1)


class EngineCore:
    """A running engine; `close` ends it.

    Attributes:
        host: the object that owns the child processes.
        context: the objects that the code of requests uses, such as client and tokenizer.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Start the processes and wait until requests are served.

        Raises:
            EngineStartError: the engine cannot start.
            RuntimeError: a child of `multiprocessing` is importing the user's script again.
        """
        if getattr(multiprocessing.process.current_process(), "_inheriting", False):
            # Without this check every such child process would start another engine and then fail.
            raise RuntimeError(_REIMPORTED)
        with translated():
            prepared = prepare_engine(config)
        self.host: EngineProcesses
        self.context: ServiceContext
        self.host, self.context = assemble(prepared, restarts=False)
        self._owner_pid = os.getpid()
        self._loop = LoopThread(f"headrace-engine-{next(_numbers)}")
        self._background = Background(self.host.ended)
        self._is_closed = False
        try:
            with translated():
                self._loop.call(self._start())
        except BaseException:
            self.close()
            raise

    async def _start(self) -> None:
        await self.host.start()
        await self.host.wait_ready()
        timeout_s = self.context.config.logging.watchdog_timeout
        self._background.keep(partial(watch, self.host, timeout_s), "The watchdog")

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the engine's loop and wait for its result; Ctrl-C cancels it."""
        self._check_owner(coroutine)
        try:
            return self._loop.call(coroutine)
        except LoopClosed:
            raise self._shut_down() from None

    async def call_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the engine's loop, and await its result in any other event loop."""
        self._check_owner(coroutine)
        try:
            return await self._loop.call_async(coroutine)
        except LoopClosed:
            raise self._shut_down() from None

    def leave(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Schedule `coroutine` on the engine's loop, without waiting; do nothing after `close`."""
        if os.getpid() != self._owner_pid:
            coroutine.close()
            return
        try:
            self._loop.submit(coroutine)
        except LoopClosed:
            return

    def check_alive(self) -> None:
        """Raise an error if the engine is dead.

        Raises:
            EngineDead: a process of the engine died; the message contains its failure.
        """
        if self.host.status.phase == "failed":
            raise EngineDead(self.host.status.last_failure or "The engine died.")

    def _check_owner(self, coroutine: Coroutine[Any, Any, T]) -> None:
        # A forked process has no copy of the loop's thread, so a call in it would wait for ever.
        if os.getpid() != self._owner_pid:
            coroutine.close()
            raise EngineError("This engine belongs to another process, which forked this one.")

    @staticmethod
    def _shut_down() -> EngineDeadError:
        return EngineDeadError("The engine was shut down.")

    def close(self) -> None:
        """End the engine's child processes and its event loop; a second call does nothing.

        Calls that are still in progress raise an error. This method returns after the processes
        have exited, so their memory is free. Only processes that this engine started are ended.
        """
        # In a forked process this object is a copy, which does not own the engine's processes.
        if self._is_closed or os.getpid() != self._owner_pid:
            return
        self._is_closed = True
        self.host.end_children()
        self.context.images.close()
        self._loop.stop(self._stop())

    async def _stop(self) -> None:
        await self._background.stop()
        await self.host.stop()
