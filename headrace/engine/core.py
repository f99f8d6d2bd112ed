"""One engine's processes, client and loop; independent of the public methods."""

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
        host: the owner of the child processes.
        context: the engine as requests see it.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Start the processes and wait until requests are served.

        Raises:
            EngineStartError: the engine cannot start.
            RuntimeError: a child of `multiprocessing` is importing the user's script again.
        """
        if getattr(multiprocessing.process.current_process(), "_inheriting", False):
            # Every such child would start another engine and then fail in the same way.
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
        """Run `coroutine` on the engine's loop and wait; Ctrl-C cancels it."""
        self._check_owner(coroutine)
        try:
            return self._loop.call(coroutine)
        except LoopClosed:
            raise self._shut_down() from None

    async def call_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the engine's loop for a task of any other loop."""
        self._check_owner(coroutine)
        try:
            return await self._loop.call_async(coroutine)
        except LoopClosed:
            raise self._shut_down() from None

    def leave(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run `coroutine` on the engine's loop soon, if the loop still exists."""
        if os.getpid() != self._owner_pid:
            coroutine.close()
            return
        try:
            self._loop.submit(coroutine)
        except LoopClosed:
            return

    def check_alive(self) -> None:
        """Raise the error that every call to a dead engine raises.

        Raises:
            EngineDead: the engine is dead; the message has the last failure of the child that died.
        """
        if self.host.status.phase == "failed":
            raise EngineDead(self.host.status.last_failure or "The engine died.")

    def _check_owner(self, coroutine: Coroutine[Any, Any, T]) -> None:
        # A fork copies no threads, so a call in the forked process would wait for ever.
        if os.getpid() != self._owner_pid:
            coroutine.close()
            raise EngineError("This engine belongs to another process, which forked this one.")

    @staticmethod
    def _shut_down() -> EngineDeadError:
        return EngineDeadError("The engine was shut down.")

    def close(self) -> None:
        """End the children and the loop; pending calls raise. Calling it again does nothing.

        Only processes that this engine started are ended. The call returns after they have exited,
        so their memory is free.
        """
        # A fork of the user's program has a copy of this object but owns none of its processes.
        if self._is_closed or os.getpid() != self._owner_pid:
            return
        self._is_closed = True
        self.host.end_children()
        self.context.images.close()
        self._loop.stop(self._stop())

    async def _stop(self) -> None:
        await self._background.stop()
        await self.host.stop()
