"""The complete HTTP application over a fake engine, in this process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from openai_api.openai_context import make_context
from runtime.config.options import (
    HttpArgs,
    LoggingArgs,
    ModelArgs,
    ServerConfig,
)
from runtime.config.parallel_options import ParallelArgs
from runtime.config.scheduling_options import SchedulingArgs
from runtime.ipc.messages import WorkerReady
from runtime.ipc.shared_state import SharedState
from runtime.processes.status import EngineStatus, ReplicaStatus
from server.app import create_app
from server.entry.application import Application
from tests.support.fake_engine import FakeEngine
from tests.support.fake_service import fake_service

WORKER = WorkerReady(
    max_total_num_tokens=16384,
    max_running_requests=8,
    page_size=16,
    dtype="float32",
    device="cpu",
    attention_backend="cpu",
    weight_bytes=2**20,
    kv_bytes=2**21,
    load_seconds=1.5,
    pid=1,
)


class FakeServer:
    """A ready server; its `client` sends requests in this process, without a socket."""

    def __init__(
        self,
        folder: Path,
        *,
        logging: LoggingArgs | None = None,
        scheduling: SchedulingArgs | None = None,
        engine_options: dict[str, Any] | None = None,
        model_options: dict[str, Any] | None = None,
        dp_size: int = 1,
        **http: Any,
    ) -> None:
        """Build the server; `http` has options of `HttpArgs`."""
        self.engine = FakeEngine(dp_size=dp_size, **(engine_options or {}))
        config = ServerConfig(
            model=ModelArgs(
                model_path="fake/model",
                tokenizer_path="fake/model",
                served_model_name="fake",
                **(model_options or {}),
            ),
            http=HttpArgs(**http),
            logging=logging or LoggingArgs(),
            scheduling=scheduling or SchedulingArgs(page_size=16, max_running_requests=8),
            parallel=ParallelArgs(dp_size=dp_size),
        )
        status = EngineStatus([_ready_replica(rank, folder) for rank in range(dp_size)])
        self.shared = status.replicas[0].shared
        status.has_started = True
        self.context = fake_service(self.engine, config=config, status=status)
        self.app: Application = create_app(make_context(self.context))
        transport = httpx.ASGITransport(app=self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:30000")

    async def generate(self, **body: Any) -> httpx.Response:
        """Send a request to `/generate`."""
        return await self.client.post("/generate", json=body)


def _ready_replica(rank: int, folder: Path) -> ReplicaStatus:
    shared = SharedState(folder / f"state-{rank}", create=True)
    shared.beat()
    shared.beat_detokenizer()
    shared["max_total_num_tokens"] = WORKER.max_total_num_tokens
    return ReplicaStatus(
        rank=rank,
        shared=shared,
        phase="ready",
        fraction=1.0,
        worker=WORKER,
        detokenizer_ready=True,
        ready_at=time.monotonic() - 3600,
    )


async def scrape(server: FakeServer, query: str = "") -> dict[tuple[str, str], float]:
    """Return the values of `/metrics` by name, and by endpoint if a sample has that label."""
    response = await server.client.get(f"/metrics{query}")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            samples[sample.name, sample.labels.get("endpoint", "")] = sample.value
    return samples
