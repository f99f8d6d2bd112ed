"""A replica: a Ray actor that runs a whole engine with the server's routes."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from starlette.types import Message, Scope

from headrace.engine.engine_errors import translated
from headrace.ray.engine_options import read_options
from headrace.ray.http_call import HttpCall, HttpHead, HttpPart
from headrace.ray.nodes import OtherNodes
from runtime.client.answer_journal import JOURNAL, AnswerJournal
from runtime.errors import StartupError
from runtime.eventloop.background import Background
from runtime.launch.assemble import assemble
from runtime.launch.prepare import prepare_engine
from runtime.processes.engine_processes import watch
from runtime.requests.identity import IDENTITY, Identity
from server.serving import make_application


class Replica:
    """One copy of the model with every route of the server, but without an HTTP port.

    The engine's processes are child processes of the Ray actor. If one dies, it is started again
    and its streams continue, as in a server.
    """

    # Ray accepts a coroutine as constructor, and awaits it on the event loop that runs the methods.
    async def __init__(  # type: ignore[misc]
        self, keywords: Mapping[str, Any]
    ) -> None:
        """Start the engine and wait until it can serve requests.

        Args:
            keywords: the server's options by name, such as `model_path` for `--model-path`.

        Raises:
            ValueError: an option is unknown, or a value has the wrong type or range.
            EngineStartError: the engine cannot start, or no API key is set.
        """
        config = read_options(keywords)
        with translated():
            if not (config.http.api_key or config.http.allow_open_admin):
                raise StartupError(
                    "No key guards the routes that change the server. Set HEADRACE_API_KEY and "
                    "HEADRACE_ADMIN_API_KEY for Ray's actors, or allow_open_admin=true."
                )
            self._nodes = OtherNodes(keywords, config.parallel)
            if self._nodes.keywords != keywords:
                config = read_options(self._nodes.keywords)
            prepared = await asyncio.to_thread(prepare_engine, config)
        self._host, self._context = assemble(prepared)
        self._background = Background(self._host.ended)
        with translated():
            await self._host.start()
            self._nodes.start(self._host.ended, lambda: self._host.status.has_started)
            self._app, _ = make_application(self._context, prepared.folders.run)
            await self._host.wait_ready()
        timeout_s = self._context.config.logging.watchdog_timeout
        self._background.keep(partial(watch, self._host, timeout_s), "The watchdog")
        self._context.lifecycle.warmed_up = True

    async def answer(self, call: HttpCall) -> AsyncIterator[HttpHead | HttpPart]:
        """Answer an HTTP request: yield the head, then the parts of the body as they are made.

        If another replica began the answer, it is repeated from its beginning and then continued.
        """
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": call.method,
            "scheme": "http",
            "path": call.path,
            "raw_path": call.path.encode(),
            "query_string": call.query,
            "root_path": "",
            "headers": call.headers,
            "client": None,
            "server": None,
        }
        incoming: asyncio.Queue[Message] = asyncio.Queue()
        outgoing: asyncio.Queue[Message | None] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": call.body, "more_body": False})
        context, journal = contextvars.copy_context(), AnswerJournal()
        if (resumption := call.resumption) is not None:
            journal = AnswerJournal(resumption.entries)
            context.run(JOURNAL.set, journal)
            context.run(IDENTITY.set, Identity(resumption.key, resumption.created))
        answering = self._app(scope, incoming.get, outgoing.put)
        task = asyncio.create_task(answering, context=context)
        task.add_done_callback(lambda _: outgoing.put_nowait(None))
        try:
            while (message := await outgoing.get()) is not None:
                if message["type"] == "http.response.start":
                    yield HttpHead(message["status"], list(message.get("headers", [])))
                elif message.get("body"):
                    yield HttpPart(message["body"], journal.take_unsent())
            await task
        finally:
            # The answer is complete, or the ingress no longer reads it.
            incoming.put_nowait({"type": "http.disconnect"})
            if not task.done():
                await asyncio.wait([task], timeout=5)
                task.cancel()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers that `replicas_wanted` reads; Ray calls this method."""
        worker = self._context.status.worker
        rows = 0 if worker is None else worker.max_running_requests
        num_requests = self._context.client.num_in_flight
        return {"num_requests": float(num_requests), "max_running_requests": float(rows)}

    async def check_health(self) -> None:
        """Raise an error if the engine has ended for good; Ray calls this method.

        Raises:
            RuntimeError: the engine's processes could not be started again.
        """
        if self._host.status.phase == "failed":
            raise RuntimeError(self._host.status.last_failure or "The engine has ended.")

    async def __del__(self) -> None:
        """End the engine's processes; Ray calls this method once the requests have ended."""
        await self._background.stop()
        await self._host.stop()
        await self._nodes.stop()
