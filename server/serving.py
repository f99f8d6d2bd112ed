"""Runs a server on its event loop: child processes, HTTP, warm-up, watchdog and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from runtime.checkpoint.model_spec import ModelSpec
from runtime.errors import StartupError
from runtime.eventloop.background import Background
from runtime.ipc.logging import announce
from runtime.ipc.process import uncollected
from runtime.launch.assemble import assemble
from runtime.processes.engine_processes import EngineProcesses, watch
from runtime.processes.resident import resident_bytes
from runtime.service.context import ServiceContext
from server.banner import READY_LINE, banner, warn_if_open
from server.connection_limit import ConnectionLimit, connections_within, raise_descriptor_limit
from server.garbage import settle
from server.listener import Prepared, describe_bind_error
from server.progress_log import ProgressLog
from server.restart_signal import follow_restart_signal
from server.shutdown import Shutdown
from server.startup_faults import as_one_line
from server.tls import Certificate
from server.warmup import warm_up

if TYPE_CHECKING:
    from openai_api.openai_context import OpenAIContext
    from server.entry.application import Application

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# The most bytes of decoded images of all running and waiting requests. One request may have tens of
# megabytes, and thousands of requests may wait.
_MAX_PIXEL_BYTES = 4 * 2**30
# Seconds that the last answers in flight get after draining, until connections are closed.
_CLOSE_GRACE_S = 2
# Seconds. It is longer than the 60 s of load balancers: otherwise a balancer could send a request
# at the moment when its idle connection is closed here.
_KEEP_ALIVE_S = 75


class _HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # uvicorn's own hook
        # Signals are handled by `Shutdown`: uvicorn would close the port at once, without draining.
        yield


async def serve(prepared: Prepared) -> int:
    """Serve until stopped; return the exit status.

    Raises:
        StartupError: the engine or the port failed before the server was ready.
    """
    config = prepared.engine.resolved.config
    # The limit is raised before the children start, because they inherit it.
    num_descriptors = raise_descriptor_limit()
    limit = ConnectionLimit(config.http.max_connections or connections_within(num_descriptors))
    host, context = assemble(prepared.engine)
    client = context.client
    client.max_pixel_bytes = _MAX_PIXEL_BYTES
    shutdown = Shutdown(context.lifecycle, client, config.http.drain_timeout)
    shutdown.install()
    try:
        try:
            prepared.listener.listen(_BACKLOG)
        except OSError as error:
            text = describe_bind_error(error, config.http.host, prepared.port)
            raise StartupError(text) from None
        host.on_change.append(ProgressLog())
        await host.start()
        return await _run(prepared, context, host, shutdown, limit)
    finally:
        await host.stop()
        prepared.listener.close()


async def _run(
    prepared: Prepared,
    context: ServiceContext,
    host: EngineProcesses,
    shutdown: Shutdown,
    limit: ConnectionLimit,
) -> int:
    app, openai = make_application(context, prepared.engine.folders.run)
    from openai_api.endpoints.batch_answer import answer as answer_line

    http_server = _http_server(app, prepared.certificate, limit)
    http = asyncio.create_task(http_server.serve(sockets=[prepared.listener]))
    startup = asyncio.create_task(_start_up(prepared, context, host))
    background = Background(host.ended)
    background.keep(partial(watch, host, context.config.logging.watchdog_timeout), "The watchdog")
    background.keep(partial(follow_restart_signal, context), "Following SIGUSR2")
    if app.observer is not None:
        background.keep(app.observer.measure_loop, "Measuring the event loop")
    if prepared.certificate is not None:
        background.keep(prepared.certificate.follow, "Following the certificate")
    if openai.batch_service is not None:
        answering = partial(openai.batch_service.run, context, partial(answer_line, openai))
        background.keep(answering, "Answering batches")
    stopping = asyncio.create_task(shutdown.requested.wait())
    try:
        await asyncio.wait((http, startup, stopping), return_when=asyncio.FIRST_COMPLETED)
        if startup.done() and not stopping.done():
            # This raises the error of the start, if any. Otherwise the server runs until stopped.
            startup.result()
            await asyncio.wait((http, stopping), return_when=asyncio.FIRST_COMPLETED)
        await shutdown.drain()
    finally:
        for task in (startup, stopping):
            task.cancel()
        await background.stop()
        if openai.batch_service is not None:
            # The folder is released before the port, because the next server uses the same folder.
            await openai.batch_service.close()
        http_server.force_exit = shutdown.hurried.is_set()
        http_server.should_exit = True
        await asyncio.gather(http, startup, stopping, return_exceptions=True)
        if app.tracing is not None:
            await asyncio.to_thread(app.tracing.close)
    if http.exception() is not None:
        logger.error("The HTTP server failed", exc_info=http.exception())
    return 0 if shutdown.requested.is_set() else 1


def make_application(
    context: ServiceContext, run_folder: Path
) -> tuple[Application, OpenAIContext]:
    """Build the application with the routes of all APIs, and the context of the OpenAI routes.

    Args:
        context: the service context.
        run_folder: folder of this run, which holds files and batches unless an option names a
            folder for them.

    Raises:
        StartupError: the chat template cannot be read.
    """
    # The web framework is imported after the children have started, while they import torch.
    with uncollected():
        from openai_api.batches.batch_service import open_batches
        from openai_api.openai_context import make_context
        from server.app import create_app

    with as_one_line("Reading the chat template"):
        openai = make_context(context)
    batches = open_batches(context.config.http, run_folder / "files")
    openai = dataclasses.replace(openai, batch_service=batches)
    return create_app(openai), openai


def _http_server(
    app: Application, certificate: Certificate | None, limit: ConnectionLimit
) -> _HttpServer:
    from server.protocol import GuardedProtocol

    uvicorn_config = uvicorn.Config(
        app,
        # The parameter's type is a class, but uvicorn only calls it.
        http=cast("Any", partial(GuardedProtocol, limit=limit)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_GRACE_S,
    )
    if certificate is not None:
        # `load` would replace `ssl` by a context made from files, which uvicorn never reads again.
        # So it is called first, and `ssl` is set afterwards.
        uvicorn_config.load()
        uvicorn_config.ssl = certificate.context
    return _HttpServer(uvicorn_config)


def _first_path(model: ModelSpec) -> str:
    """Return the path to which the warm-up sends its requests."""
    if model.gives == "tokens":
        return "/generate"
    return "/pooling" if model.pooling.per_token else "/encode"


async def _start_up(prepared: Prepared, context: ServiceContext, host: EngineProcesses) -> None:
    grammars = context.client.grammars
    if grammars is not None and grammars.starts_at_once:
        # The child imports the grammar library while the weights load, at low priority, so that the
        # first request with a grammar need not wait for that.
        grammars.start()
    await host.wait_ready()
    config = context.config
    speed = None
    if not config.http.skip_server_warmup:
        speed = await warm_up(
            config.http,
            prepared.port,
            config.parallel.dp_size,
            has_tokenizer=not config.model.skip_tokenizer_init,
            path=_first_path(context.model),
        )
    context.lifecycle.warmed_up = True
    settle()
    warn_if_open(config.http)
    resident = resident_bytes([os.getpid(), *host.pids().values()])
    announce(banner(context, prepared.port, speed, resident))
    announce(READY_LINE)
