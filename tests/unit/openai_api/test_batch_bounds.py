"""Bounds of a tenant: as much space as it leaves free, and a number of unfinished batches."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from openai_api.batches.batch_runner import MAX_UNFINISHED
from openai_api.batches.file_store import FILE_BYTES
from runtime.client.tenant import TENANT, acting_for
from runtime.errors import InvalidRequest
from tests.support.batches import TEXT, Batches


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Any]:
    made: list[Batches] = []

    def build(**options: Any) -> Batches:
        made.append(Batches(tmp_path, **options))
        return made[-1]

    yield build
    for each in made:
        await each.close()


async def test_a_tenant_leaves_as_much_room_as_it_takes(make: Any) -> None:
    batches = make(max_bytes=1000 + 4 * FILE_BYTES)
    found: dict[str, list[bool]] = {}
    for tenant in ("one", "one", "one", "two", "two", ""):
        with acting_for(tenant):
            try:
                await batches.files.add(b"", "a", tenant, None)
                found.setdefault(tenant, []).append(True)
            except InvalidRequest:
                found.setdefault(tenant, []).append(False)
    assert found == {"one": [True, True, False], "two": [True, False], "": [True]}


@pytest.mark.parametrize("together", [True, False])
async def test_unfinished_batches_are_bounded_for_each_tenant(make: Any, together: bool) -> None:
    batches = make()
    line = orjson.dumps({"custom_id": "n", "url": TEXT, "body": {"prompt": "a"}})

    async def create(num: int) -> dict[int, int]:
        file = await batches.files.add(line, "a", TENANT.get(), None)
        asked = {"input_file_id": file.id, "endpoint": TEXT, "completion_window": "24h"}
        found: list[int] = []
        calls = [batches.client.post("/v1/batches", json=asked) for _ in range(num)]
        if together:
            found += [each.status_code for each in await asyncio.gather(*calls)]
        else:
            found += [(await each).status_code for each in calls]
        return Counter(found)

    wanted = {200: MAX_UNFINISHED, 400: 6}
    assert await create(MAX_UNFINISHED + 6) == wanted
    # Another tenant's do not count; a record of it stands for its request.
    record = next(iter(batches.runner.running.values()))
    for name, each in list(batches.runner.running.items()):
        batches.runner.running[name] = msgspec.structs.replace(each, tenant="other")
    assert record.tenant == ""
    assert (await create(1)) == {200: 1}
