"""`/last_errors` tells the operator what was refused lately."""

from server.entry.last_errors import MAX_KEPT
from tests.support.fake_server import FakeServer


async def test_it_tells_of_refusals_the_latest_first(tmp_path):
    client = FakeServer(tmp_path).client
    assert (await client.post("/last_errors")).json() == {"errors": []}
    await client.post("/v1/chat/completions", json={"messages": 1}, headers={"x-request-id": "r1"})
    await client.get("/nowh%C3%A9re%07")
    await client.get("/health")
    latest, first = (await client.post("/last_errors")).json()["errors"]
    assert (latest["status"], latest["method"], latest["path"]) == (404, "GET", "/nowh?re?")
    assert (first["status"], first["path"]) == (400, "/v1/chat/completions")
    assert first["request_id"] == "r1"
    assert "messages" in first["reason"]


async def test_it_keeps_few(tmp_path):
    client = FakeServer(tmp_path).client
    for number in range(MAX_KEPT + 5):
        await client.get(f"/{number}")
    kept = (await client.post("/last_errors")).json()["errors"]
    assert [each["path"] for each in kept] == [f"/{n}" for n in range(MAX_KEPT + 4, 4, -1)]
