"""Batches over a fake engine: concurrency, priority, owners, endings."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from openai_api.batches.batch_lines import BadLine, check_line
from openai_api.batches.batch_runner import (
    MAX_LINE_BYTES,
    MAX_LINES,
    MAX_VALUES,
)
from openai_api.batches.batch_store import WINDOW_S, BatchRecord
from openai_api.batches.file_store import FILE_BYTES, UnknownFile
from openai_api.schemas.batches import ENDPOINTS
from runtime.client.tenant import TENANT
from runtime.ipc.messages import FinishReason
from tests.support.batches import TEXT, Batches
from tests.support.fake_server import WORKER, FakeServer
from tests.support.waiting import until_in_loop


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Any]:
    made: list[Batches] = []

    def build(**options: Any) -> Batches:
        made.append(Batches(tmp_path, **options))
        return made[-1]

    yield build
    for each in made:
        await each.close()


async def test_lines_at_once_are_bounded(make: Any) -> None:
    batches = make(engine_options={"hold": "HOLD"})
    most = WORKER.max_running_requests // 4
    async with batches.running():
        first = await batches.submit(*[{"prompt": f"HOLD{at}"} for at in range(9)])
        second = await batches.submit(*[{"prompt": f"HOLD x{at}"} for at in range(9)])
        await until_in_loop(lambda: len(batches.engine.requests) == most)
        # All others find room, and are answered meanwhile.
        answer = await batches.client.post(TEXT, json={"prompt": "Hi"})
        assert answer.json()["choices"][0]["text"] == "Hi"
        assert len(batches.engine.requests) == most + 1
        mine = [each for each in batches.engine.requests if each.spec.priority < 0]
        assert len(mine) == most
        for batch_id in (first, second):
            await batches.client.post(f"/v1/batches/{batch_id}/cancel")
            assert (await batches.ended(batch_id))["status"] == "cancelled"
        # Whatever was in the engine was ended there.
        assert len(batches.engine.aborted) == len(batches.engine.requests) - 1


async def test_nothing_begins_while_others_wait(make: Any) -> None:
    batches = make()
    batches.server.shared["num_queue_reqs"] = 1
    async with batches.running():
        batch_id = await batches.submit({"prompt": "a"}, {"prompt": "b"})
        await until_in_loop(lambda: batches.runner.running[batch_id].status == "in_progress")
        # As often as it looks in that time.
        turns = iter(range(20))
        await until_in_loop(lambda: next(turns, None) is None)
        assert not batches.engine.requests
        batches.server.shared["num_queue_reqs"] = 0
        assert (await batches.ended(batch_id))["request_counts"]["completed"] == 2


async def test_refusals_for_lack_of_room_are_tried_again(make: Any) -> None:
    batches = make()
    batches.engine.refuse = FinishReason("abort", message="Full.", status_code=503)
    async with batches.running():
        batch_id = await batches.submit({"prompt": "a"})
        await until_in_loop(lambda: batches.engine.requests)
        batches.engine.refuse = None
        done = await batches.ended(batch_id)
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", 1)
    assert len(batches.engine.requests) == 2


async def test_what_is_not_answered_in_time_expires(make: Any) -> None:
    batches = make(engine_options={"hold": "HOLD"})
    batch_id = await batches.submit({"prompt": "HOLD"}, {"prompt": "HOLD"})
    record = batches.runner.running[batch_id]
    record.created_at = int(batches.now) - WINDOW_S
    async with batches.running():
        done = await batches.ended(batch_id)
    assert done["status"] == "expired"
    assert done["expired_at"] == batches.now
    assert done["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    for line in await batches.lines(done["error_file_id"]):
        assert line["response"] is None
        assert line["error"]["code"] == "batch_expired"


async def test_the_next_server_goes_on(make: Any) -> None:
    batches = make(engine_options={"hold": "HOLD"})
    bodies = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "HOLD"}]
    async with batches.running():
        batch_id = await batches.submit(*bodies)
        await until_in_loop(lambda: len(batches.engine.requests) == 3)
        record = batches.runner.running[batch_id]
        while len(await batches.store.answered(batch_id)) < 2:
            await until_in_loop(lambda: True)
    await batches.close()
    after = make()
    async with after.running():
        # Once it has begun; it may be over already.
        await until_in_loop(lambda: after.engine.requests)
        done = await after.ended(batch_id)
    assert record.total == done["request_counts"]["total"] == 3
    assert len(after.engine.requests) == 1
    names = [line["custom_id"] for line in await after.lines(done["output_file_id"])]
    assert names == ["n0", "n1", "n2"]


async def test_what_an_earlier_server_left_can_be_cancelled_at_once(make: Any) -> None:
    batches = make(engine_options={"hold": "HOLD"})
    async with batches.running():
        batch_id = await batches.submit({"prompt": "a"}, {"prompt": "HOLD"})
        await until_in_loop(lambda: len(batches.engine.requests) == 2)
    await batches.close()
    after = make()
    cancelling = asyncio.create_task(after.client.post(f"/v1/batches/{batch_id}/cancel"))
    # It must not be answered before the batch is found.
    assert not (await asyncio.wait([cancelling], timeout=0.1))[0]
    async with after.running():
        answer = await cancelling
        assert answer.status_code == 200, answer.text
        # It may have ended by the time that its answers are counted.
        assert answer.json()["status"] in ("cancelling", "cancelled")
        assert (await after.ended(batch_id))["status"] == "cancelled"


async def test_a_batch_that_nobody_works_on_is_cancelled_later(make: Any) -> None:
    batches = make(engine_options={"hold": "HOLD"})
    async with batches.running():
        batch_id = await batches.submit({"prompt": "HOLD"})
        await until_in_loop(lambda: batches.engine.requests)
    # The server is about to leave.
    answer = await batches.client.post(f"/v1/batches/{batch_id}/cancel")
    assert answer.status_code == 503
    assert "try again" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]


async def test_who_waits_for_a_batch_is_told_that_the_server_leaves(make: Any) -> None:
    batches = make(engine_options={"hold": "HOLD"})
    async with batches.running():
        batch_id = await batches.submit({"prompt": "HOLD"})
        await until_in_loop(lambda: batches.engine.requests)
    await batches.close()
    after = make()
    cancelling = asyncio.create_task(after.client.post(f"/v1/batches/{batch_id}/cancel"))
    assert not (await asyncio.wait([cancelling], timeout=0.1))[0]
    after.context.service.lifecycle.draining = True
    async with after.running():
        assert (await cancelling).status_code == 503


async def test_a_tenant_sees_what_is_its_own(make: Any) -> None:
    batches = make()
    batch_id = await batches.submit({"prompt": "a"})
    file_id = batches.runner.running[batch_id].input_file_id
    paths = (f"/v1/batches/{batch_id}", f"/v1/files/{file_id}", f"/v1/files/{file_id}/content")
    for path in paths:
        assert (await batches.client.get(path)).status_code == 200
    with pytest.raises(UnknownFile):
        await batches.files.get(file_id, "somebody")
    assert not TENANT.get()


async def test_owners_of_keys_are_apart(make: Any, tmp_path: Path) -> None:
    """Neither sees, reads, cancels, deletes or uses what is the other's; each has its own."""
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    keys.chmod(0o600)
    batches = make(api_key="k", admin_api_key="a", api_keys_file=str(keys))

    def act_as(key: str) -> None:
        batches.client.headers["Authorization"] = f"Bearer {key}"

    async def listed(path: str) -> set[str]:
        return {each["id"] for each in (await batches.client.get(path)).json()["data"]}

    act_as("first")
    batch_id = await batches.submit({"prompt": "One"})
    file_id = batches.runner.running[batch_id].input_file_id
    refused = [
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("DELETE", f"/v1/files/{file_id}"),
        ("GET", f"/v1/batches/{batch_id}"),
        ("POST", f"/v1/batches/{batch_id}/cancel"),
    ]
    use = {"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h"}
    for key in ("second", "k"):
        act_as(key)
        for method, path in refused:
            assert (await batches.client.request(method, path)).status_code == 404, (key, path)
        assert (await batches.client.post("/v1/batches", json=use)).status_code == 404
        assert not await listed("/v1/files")
        assert not await listed("/v1/batches")
    act_as("second")
    other_id = await batches.submit({"prompt": "Two"})
    assert await listed("/v1/batches") == {other_id}
    async with batches.running():
        done = {"first": batch_id, "second": other_id}
        for key in done:
            act_as(key)
            ended = await batches.ended(done[key])
            (answer,) = await batches.lines(ended["output_file_id"])
            said = answer["response"]["body"]["choices"][0]["text"]
            assert said == ("One" if key == "first" else "Two")
            assert await listed("/v1/batches") == {done[key]}
            assert await listed("/v1/files") == {ended["input_file_id"], ended["output_file_id"]}
            act_as("second" if key == "first" else "first")
            path = f"/v1/files/{ended['output_file_id']}/content"
            assert (await batches.client.get(path)).status_code == 404


async def test_a_file_that_vanishes_while_it_is_asked_for(make: Any) -> None:
    batches = make()
    batch_id = await batches.submit({"prompt": "a"})
    file_id = batches.runner.running[batch_id].input_file_id
    batches.files.path(file_id).unlink()
    answer = await batches.client.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 404
    async with batches.running():
        done = await batches.ended(batch_id)
    assert (done["status"], done["errors"]["data"][0]["code"]) == ("failed", "missing_file")


async def test_an_input_that_expires_stays_while_it_is_read(make: Any) -> None:
    batches = make()
    line = orjson.dumps({"custom_id": "n", "url": TEXT, "body": {"prompt": "a"}})
    file = await batches.files.add(line, "a", "", 3600)
    asked = {"input_file_id": file.id, "endpoint": TEXT, "completion_window": "24h"}
    batch_id = (await batches.client.post("/v1/batches", json=asked)).json()["id"]
    batches.now += 3600
    assert (await batches.client.get(f"/v1/files/{file.id}")).status_code == 200
    async with batches.running():
        assert (await batches.ended(batch_id))["status"] == "completed"
    assert (await batches.client.get(f"/v1/files/{file.id}")).status_code == 404


async def test_the_store_is_bounded(make: Any) -> None:
    batches = make(max_bytes=1000 + 3 * FILE_BYTES)

    async def upload(size: int) -> int:
        form: dict[str, Any] = {"files": {"file": ("a", b"x" * size)}, "data": {"purpose": "batch"}}
        return (await batches.client.post("/v1/files", **form)).status_code

    assert [await upload(600), await upload(600 + FILE_BYTES), await upload(300)] == [200, 400, 200]
    form: dict[str, Any] = {
        "files": {"file": ("b", b"x" * 50)},
        "data": {
            "purpose": "batch",
            "expires_after[anchor]": "created_at",
            "expires_after[seconds]": "3600",
        },
    }
    assert (await batches.client.post("/v1/files", **form)).status_code == 200
    assert await upload(60) == 400
    batches.now += 3600
    assert await upload(60) == 200
    names = [file["filename"] for file in (await batches.client.get("/v1/files")).json()["data"]]
    assert names == ["a", "a", "a"]


async def test_files_without_content_take_room_too(make: Any) -> None:
    batches = make(max_bytes=2 * FILE_BYTES)
    form: dict[str, Any] = {"files": {"file": ("a", b"")}, "data": {"purpose": "batch"}}
    found = [(await batches.client.post("/v1/files", **form)).status_code for _ in range(3)]
    assert found == [200, 200, 400]


async def test_of_batches_that_are_over_the_newest_stay(make: Any) -> None:
    batches = make(max_over=2)

    def record(name: str, tenant: str, status: Any) -> BatchRecord:
        return BatchRecord(
            id=name, tenant=tenant, endpoint=TEXT, input_file_id="f", created_at=1, status=status
        )

    await batches.store.put(record("runs", "", "in_progress"))
    await batches.store.put(record("other", "somebody", "failed"))
    for at in range(4):
        await batches.store.put(record(f"b{at}", "", "validating"))
        await batches.store.put(record(f"b{at}", "", "failed"))
    found = (await batches.client.get("/v1/batches?limit=2&order=asc")).json()
    assert [each["id"] for each in found["data"]] == ["runs", "b2"]
    assert found["has_more"]
    found = (await batches.client.get("/v1/batches?after=b2&order=asc")).json()
    assert [each["id"] for each in found["data"]] == ["b3"]
    assert (await batches.store.get("other", "somebody")).status == "failed"


async def test_more_lines_than_there_may_be(make: Any) -> None:
    batches = make(max_bytes=10**8)
    content = b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    lines = b"".join(content % at for at in range(MAX_LINES + 1))
    answer = await batches.client.post(
        "/v1/files", files={"file": ("a", lines)}, data={"purpose": "batch"}
    )
    asked = {"input_file_id": answer.json()["id"], "endpoint": TEXT, "completion_window": "24h"}
    batch_id = (await batches.client.post("/v1/batches", json=asked)).json()["id"]
    async with batches.running():
        done = await batches.ended(batch_id)
    assert done["status"] == "failed"
    assert done["errors"]["data"][0]["code"] == "too_many_requests"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {f"n{at}": "" for at in range(17)}}, "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
async def test_requests_that_are_refused(make: Any, change: dict[str, Any], param: str) -> None:
    batches = make()
    asked = {"input_file_id": "file-a", "endpoint": TEXT, "completion_window": "24h", **change}
    answer = await batches.client.post("/v1/batches", json=asked)
    assert (answer.status_code, answer.json()["param"]) == (400, param)


async def test_answers_on_disk_are_for_the_servers_user_alone(make: Any, tmp_path: Path) -> None:
    batches = make()
    await batches.submit({"prompt": "a"})
    folder = tmp_path / "files"
    assert (folder / "contents").stat().st_mode & 0o777 == 0o700
    kept = [each for each in folder.iterdir() if each.is_file()]
    assert "batches.sqlite-wal" in {each.name for each in kept}
    assert {each.stat().st_mode & 0o777 for each in kept} == {0o600}


async def test_a_batch_that_is_over_is_not_cancelled(make: Any) -> None:
    batches = make()
    batch_id = await batches.submit({"prompt": "a"})
    # It is among those that run until its answers are cleaned away.
    record = batches.runner.running[batch_id]
    record.status = "completed"
    answer = await batches.client.post(f"/v1/batches/{batch_id}/cancel")
    assert answer.status_code == 400
    assert "completed" in answer.json()["error"]["message"]
    assert record.status == "completed"


async def test_a_batch_that_cannot_be_kept_ends_no_other(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = make()
    lost = await batches.submit({"prompt": "a"})
    found = await batches.submit({"prompt": "b"})
    put = batches.store.put

    async def full(record: BatchRecord) -> None:
        if record.id == lost:
            raise sqlite3.OperationalError("database or disk is full")
        await put(record)

    monkeypatch.setattr(batches.store, "put", full)
    async with batches.running():
        assert (await batches.ended(found))["status"] == "completed"
        await until_in_loop(lambda: lost not in batches.runner.running)


async def test_a_line_of_too_many_values_is_not_decoded(make: Any) -> None:
    batches = make(max_bytes=10**8)
    batch_id = await batches.submit({"prompt": [1] * MAX_VALUES})
    async with batches.running():
        done = await batches.ended(batch_id)
    assert (done["status"], done["errors"]["data"][0]["code"]) == ("failed", "line_too_long")


async def test_a_line_of_too_many_bytes_is_not_decoded(make: Any) -> None:
    batches = make(max_bytes=2**26)
    async with batches.running():
        batch = await batches.ended(
            await batches.submit({"prompt": "a"}, {"prompt": "b" * MAX_LINE_BYTES * 2}, {})
        )
    assert (batch["status"], batch["request_counts"]["total"]) == ("failed", 3)
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"]) == ("line_too_long", 2)


def test_what_is_said_of_a_line_is_short() -> None:
    # A hundred of these are kept with a batch, and every list of batches reads them.
    with pytest.raises(BadLine) as told:
        check_line({"a" * 10**6: 1})
    assert len(str(told.value)) < 300


@pytest.mark.parametrize("limit", ["0", "101", "00000000199", "000000001" + "0" * 5000, "-1", "a"])
async def test_no_page_is_larger_than_it_may_be(make: Any, limit: str) -> None:
    answer = await make().client.get("/v1/batches", params={"limit": limit})
    assert (answer.status_code, answer.json()["param"]) == (400, "limit")


async def test_a_server_without_files_says_so(tmp_path: Path) -> None:
    async with FakeServer(tmp_path).client as client:
        for path in ("/v1/files", "/v1/batches", "/v1/files/file-a", "/v1/batches/batch_a"):
            answer = await client.get(path)
            assert answer.status_code == 400
            assert "--file-store-mb" in answer.json()["error"]["message"]
        assert (await client.get("/v1/files/other")).status_code == 404


def test_every_endpoint_has_a_handler() -> None:
    for url in ENDPOINTS:
        assert check_line({"custom_id": "a", "url": url, "body": {}}) == (url, {})
