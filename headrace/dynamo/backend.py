"""An engine in the form that Dynamo's `Worker` runs: it starts, generates, reports and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource

from headrace.dynamo.arguments import read_arguments, with_kv_events
from headrace.dynamo.request_fields import chunk_of, read_request, translate
from runtime.config.kv_events_config import KVEventsConfig
from runtime.config.options import ServerConfig
from runtime.errors import EngineDead, HeadraceError
from runtime.eventloop.background import Background
from runtime.launch.assemble import assemble
from runtime.launch.prepare import prepare_engine
from runtime.processes.engine_processes import EngineProcesses, watch
from runtime.service.context import ServiceContext
from runtime.service.generate_request import GeneratePlan, plan_generate
from runtime.service.generation import admit_plan

logger = logging.getLogger(__name__)

_REPORT_S = 0.1


class Backend(LLMEngine):
    """One copy of the model. Dynamo tokenizes prompts, routes requests and decodes the answers.

    The engine's processes are child processes. If one dies, it is started again and its streams
    continue, as in a server. If this process dies, the frontend sends its requests, with the tokens
    so far, to another worker (`--migration-limit`).
    """

    def __init__(self, config: ServerConfig, model_folder: Path) -> None:
        """Keep the options; `start` starts the engine."""
        self._config = config
        self._model_folder = model_folder
        self._host: EngineProcesses | None = None
        self._context: ServiceContext
        self._background: Background | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._publisher: Any = None
        # For each request of Dynamo, the names of its samples in the engine.
        self._rids: dict[str, list[str]] = {}

    @classmethod
    async def from_args(cls, argv: Sequence[str] | None = None) -> tuple[Backend, WorkerConfig]:
        """Return an engine and its worker's options from the command line; nothing is started."""
        config, worker, folder = await asyncio.to_thread(read_arguments, argv)
        return cls(config, folder), worker

    async def start(self, worker_id: int) -> EngineConfig:
        """Start the engine's processes; return the model's properties that the frontend needs.

        Raises:
            StartupError: the engine cannot start.
        """
        del worker_id
        if self._config.scheduling.kv_events_config is None:
            self._folder = tempfile.TemporaryDirectory(prefix="headrace-dynamo-")
            self._config = with_kv_events(self._config, Path(self._folder.name) / "kv")
        prepared = await asyncio.to_thread(prepare_engine, self._config)
        self._host, self._context = assemble(prepared)
        await self._host.start()
        await self._host.wait_ready()
        timeout_s = self._context.config.logging.watchdog_timeout
        self._background = Background(self._host.ended)
        self._background.keep(partial(watch, self._host, timeout_s), "The watchdog")
        self._background.run(self._report(), "The report of the load")
        worker = self._context.status.worker
        assert worker is not None
        chunk = self._context.config.scheduling.chunked_prefill_size
        return EngineConfig(
            model=str(self._model_folder),
            served_model_name=self._context.served_model_name,
            llm=LlmRegistration(
                context_length=self._context.client.limits.context_len,
                kv_cache_block_size=worker.page_size,
                total_kv_blocks=worker.max_total_num_tokens // worker.page_size,
                max_num_seqs=worker.max_running_requests,
                # A chunk size of -1 means that prompts are computed whole.
                max_num_batched_tokens=None if chunk == -1 else chunk,
            ),
        )

    async def generate(
        self, request: Mapping[str, Any], context: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Answer a request: yield chunks of token ids as they are made.

        Raises:
            InvalidArgument: the request is wrong.
            EngineShutdown: the engine cannot answer it now; another worker may.
        """
        name = context.id()
        try:
            plan = self._plan(request)
            generation = await admit_plan(self._context, plan, [list(request["token_ids"])])
            self._rids[name] = [sample.spec.rid for sample in plan.samples]
            if context.is_stopped() or context.is_killed():
                # `abort` was called before the samples had names.
                await self.abort(context)
            num_tokens, finish = 0, None
            try:
                async for _, answer in generation.answers(incremental=True):
                    chunk = chunk_of(answer)
                    num_tokens += len(chunk["token_ids"])
                    finish = chunk.get("finish_reason")
                    yield chunk
            finally:
                generation.close()
                self._rids.pop(name, None)
                if finish in (None, "cancelled"):
                    logger.info("Request %s was aborted after %d tokens", name, num_tokens)
        except HeadraceError as error:
            raise translate(error) from None

    def _plan(self, request: Mapping[str, Any]) -> GeneratePlan:
        if (why := self._context.status.fatal) is not None:
            raise EngineDead(why)
        return plan_generate(
            read_request(request),
            self._context.sampling_defaults,
            self._context.client.limits.vocab_size,
            features=self._context.features,
        )

    async def abort(self, context: Any) -> None:
        """End a request whose client has gone."""
        for rid in self._rids.get(context.id(), ()):
            self._context.client.abort(rid)

    async def cleanup(self) -> None:
        """End the engine's processes. It may be called after a failed start, and twice."""
        if self._background is not None:
            await self._background.stop()
        if self._host is not None:
            await self._host.stop()
            self._host = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    # ---- what the router reads ----

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return the address at which the worker publishes the changes of its prefix cache."""
        found = KVEventsConfig.parse(self._config.scheduling.kv_events_config)
        if found is None or self._config.scheduling.disable_radix_cache:
            return []
        return [ZmqSource(found.endpoint.replace("*", "127.0.0.1"), found.topic)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return the indices of the replicas whose load is reported: only 0."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Store the object to which the load is reported."""
        self._publisher = publisher

    async def health_check_payload(self) -> dict[str, Any]:
        """Return the request with which Dynamo checks an idle worker."""
        first = self._context.tokenizer.bos_token_id
        return build_health_check_payload(0 if first is None else first)

    async def _report(self) -> None:
        """Report the load ten times a second; end this process if the engine has ended."""
        while True:
            await asyncio.sleep(_REPORT_S)
            if (why := self._context.status.fatal) is not None:
                logger.error("The engine has ended: %s", why)
                # Dynamo's worker then ends this process, and its supervisor starts another.
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if (worker := self._context.status.worker) is None or self._publisher is None:
                continue
            shared = self._context.status.replicas[0].shared
            used, num_prompt = shared["num_used_tokens"], shared["prompt_tokens_total"]
            load = ComponentSnapshot(
                kv_used_blocks=int(used) // worker.page_size,
                kv_total_blocks=worker.max_total_num_tokens // worker.page_size,
                gpu_cache_usage=used / worker.max_total_num_tokens,
                dp_rank=0,
                kv_cache_hit_rate=shared["cached_tokens_total"] / num_prompt
                if num_prompt
                else None,
            )
            self._publisher.publish(0, load)
