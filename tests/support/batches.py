"""The files and batches API over a fake engine, with a clock that the test sets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson

from openai_api.batches.batch_runner import BatchRunner
from openai_api.batches.batch_service import BatchService
from openai_api.batches.batch_store import MAX_OVER, BatchStore
from openai_api.batches.database import Database
from openai_api.batches.file_store import FileStore
from openai_api.endpoints.batch_answer import answer
from openai_api.openai_context import OpenAIContext, make_context
from server.app import create_app
from tests.support.fake_server import FakeServer
from tests.support.waiting import until_in_loop

TEXT = "/v1/completions"


class Batches:
    """A fake server with files and batches, whose clock is the attribute `now`."""

    def __init__(
        self, folder: Path, max_bytes: int = 10**6, max_over: int = MAX_OVER, **options: Any
    ) -> None:
        self.server = FakeServer(folder, **options)
        self.engine = self.server.engine
        self.now = 1_000_000.0
        database = Database(folder / "files")
        self.files = FileStore(database, max_bytes, lambda: self.now)
        self.store = BatchStore(database, self.files, max_over)
        self.runner = BatchRunner(self.store, self.files, lambda: self.now)
        self.service = BatchService(database, self.files, self.store, self.runner)
        context = make_context(self.server.context)
        self.context: OpenAIContext = dataclasses.replace(context, batch_service=self.service)
        transport = httpx.ASGITransport(app=create_app(self.context))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:30000")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        work = self.service.run(self.context.service, partial(answer, self.context))
        task = asyncio.create_task(work)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        if not self.client.is_closed:
            await self.client.aclose()
            await self.service.close()

    async def submit(self, *bodies: dict[str, Any]) -> str:
        content = b"".join(
            orjson.dumps({"custom_id": f"n{at}", "method": "POST", "url": TEXT, "body": body})
            + b"\n"
            for at, body in enumerate(bodies)
        )
        answer = await self.client.post(
            "/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"}
        )
        assert answer.status_code == 200, answer.text
        asked = {"input_file_id": answer.json()["id"], "endpoint": TEXT, "completion_window": "24h"}
        answer = await self.client.post("/v1/batches", json=asked)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def batch(self, batch_id: str) -> Any:
        return (await self.client.get(f"/v1/batches/{batch_id}")).json()

    async def ended(self, batch_id: str) -> Any:
        await until_in_loop(lambda: batch_id not in self.runner.running)
        return await self.batch(batch_id)

    async def lines(self, file_id: str) -> list[Any]:
        content = (await self.client.get(f"/v1/files/{file_id}/content")).content
        return [orjson.loads(line) for line in content.splitlines()]
