"""Runs an engine without HTTP, for the benchmarks `offline` and `latency` and other scripts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from headrace.bench.driver import Run
from headrace.bench.record import BenchRequest, RequestRecord
from headrace.bench.shapes import write_shape
from runtime.client.client import EngineClient
from runtime.client.generation_stream import GenerationInput
from runtime.config.options import ServerConfig
from runtime.errors import HeadraceError
from runtime.ipc.logging import configure_logging
from runtime.ipc.messages import WorkerReady
from runtime.launch.assemble import assemble
from runtime.launch.command_line import parse_args
from runtime.launch.prepare import PreparedEngine, prepare_engine
from runtime.processes.engine_processes import EngineProcesses
from runtime.processes.resident import resident_bytes
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams

T = TypeVar("T")

_FLUSH_TRIES = 50


@contextmanager
def engine_config(shape: str | None, server_options: Sequence[str]) -> Iterator[ServerConfig]:
    """Yield the configuration that `server_options` describe.

    If `shape` is given, the model is a temporary folder of this shape. If an option is wrong, the
    program exits with status 2 and one line.
    """
    options = list(server_options)
    if not any(each.split("=")[0] == "--log-level" for each in options):
        options += ["--log-level", "warning"]
    with contextlib.ExitStack() as stack:
        if shape is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-shape-"))
            path = write_shape(shape, Path(folder) / shape)
            options = ["--model-path", str(path), "--load-format", "dummy", *options]
        config = parse_args(options, prog="headrace bench").config
        configure_logging(config.logging.log_level, "bench")
        yield config


class EngineTarget:
    """A `Target` that sends requests to a running engine, without HTTP.

    Attributes:
        vocab_size: requests may use token ids below this number.
        stream: whether requests ask for tokens as they are generated.
        start_s: seconds that the engine's start took.
        worker: the report that the worker sent when it was ready.
    """

    def __init__(
        self, host: EngineProcesses, client: EngineClient, prepared: PreparedEngine, stream: bool
    ) -> None:
        """Store the engine's processes, which `host` has already started, and their client."""
        self.vocab_size = prepared.model.vocab_size
        self.stream = stream
        self.start_s = 0.0
        self.worker: WorkerReady | None = None
        self._host = host
        self._client = client
        self._tokenizer = prepared.tokenizer
        self._rids = itertools.count()

    async def wait_ready(self, started: float) -> None:
        """Wait for the engine, whose start began at `started` (`time.perf_counter()`).

        Raises:
            StartupError: the engine cannot start.
        """
        await self._host.wait_ready()
        self.start_s = time.perf_counter() - started
        self.worker = self._host.status.worker

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Run one request to its end, greedily, ignoring end-of-sequence tokens."""
        input_ids = request.input_ids
        if input_ids is None:
            if request.text is None:
                raise HeadraceError("Messages need a server: the engine alone has no template.")
            input_ids = self._tokenizer.encode(request.text)
        stream = self._client.generate(
            GenerationInput(
                input_ids,
                RequestSpec(
                    row=RowSpec(
                        sampling=SamplingParams(
                            max_new_tokens=request.output_len, temperature=0.0, ignore_eos=True
                        )
                    ),
                    rid=f"bench-{next(self._rids)}",
                    stream=self.stream,
                ),
            )
        )
        async for chunk in stream:
            if chunk.token_ids:
                record.add(time.perf_counter(), len(chunk.token_ids))
            record.prompt_tokens, record.cached_tokens = chunk.prompt_tokens, chunk.cached_tokens
        record.output_tokens = sum(record.event_tokens)

    async def flush_cache(self) -> None:
        """Drop the prefix cache.

        Raises:
            HeadraceError: the engine does not become idle.
        """
        for _ in range(_FLUSH_TRIES):
            reply = await self._client.calls.flush_cache()
            if reply.success:
                return
            # With overlap scheduling, a step may still be running after the last token has arrived.
            await asyncio.sleep(0.02)
        raise HeadraceError(f"The cache was not flushed: {reply.message}")

    def memory_mb(self) -> dict[str, float]:
        """Return the resident memory of each of the engine's processes, in MB."""
        pids = self._host.pids()
        return {name: round(resident_bytes([pid]) / 2**20, 1) for name, pid in pids.items()}


def measure_engine(
    run: Run, measure: Callable[[EngineTarget], Coroutine[Any, Any, T]], *, stream: bool = True
) -> T:
    """Start the engine that the run's options describe, call `measure` and return its result.

    Raises:
        StartupError: the engine cannot start.
    """
    with engine_config(run.options.shape, run.server_options) as config:

        async def whole() -> T:
            async with running_engine(config, stream=stream) as engine:
                return await measure(engine)

        return uvloop.run(whole())


@asynccontextmanager
async def running_engine(
    config: ServerConfig, *, stream: bool = True
) -> AsyncIterator[EngineTarget]:
    """Start an engine, yield it when ready, then stop it.

    Raises:
        StartupError: the engine cannot start; the message is one line, or the worker's last output.
    """
    started = time.perf_counter()
    prepared = prepare_engine(config)
    host, context = assemble(prepared, restarts=False)
    target = EngineTarget(host, context.client, prepared, stream)
    try:
        await host.start()
        await target.wait_ready(started)
        yield target
    finally:
        await host.stop()
