"""Good, bad, aborted and abandoned requests together; afterwards everything is as before."""

from __future__ import annotations

import asyncio
import random

import httpx

from tests.support.grammar_backends import BACKENDS
from tests.support.processes import resident_kb
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

NUM_REQUESTS = 200
IDLE_GAUGES = ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage")


def gauges(server: ServerProcess) -> dict[str, float]:
    values = {}
    for line in server.client.get("/metrics").text.splitlines():
        for name in IDLE_GAUGES:
            if line.startswith(f"sglang:{name}{{"):
                values[name] = float(line.rsplit(" ", 1)[1])
    return values


async def one(client: httpx.AsyncClient, index: int, rng: random.Random) -> str:
    kind = index % 8
    sampling = {"max_new_tokens": rng.randint(1, 60), "temperature": rng.choice([0, 0.8])}
    text = "The miller opens the gate " * rng.randint(1, 6)
    if kind == 0:
        bad = rng.choice(
            [
                {"text": "x", "sampling_params": {"temperature": -1}},
                {"text": "x", "sampling_params": {"no_such_key": 1}},
                {"input_ids": [1, 2, 10**6]},
                {"input_ids": []},
                {},
                {"text": "x", "sampling_params": {"max_new_tokens": 10**6}},
                {"text": "word " * 500},
            ]
        )
        response = await client.post("/generate", json=bad)
        assert response.status_code == 400, response.text
        return "bad"
    if kind == 1:
        # Leaves in the middle of a stream.
        body = {"text": text, "stream": True, "sampling_params": {"max_new_tokens": 150}}
        async with client.stream("POST", "/generate", json=body) as response:
            async for _ in response.aiter_lines():
                break
        return "left"
    if kind == 2:
        rid = f"abort-{index}"
        body = {"text": text, "rid": rid, "sampling_params": {"max_new_tokens": 150}}
        task = asyncio.create_task(client.post("/generate", json=body))
        await asyncio.sleep(rng.random() * 0.05)
        await client.post("/abort_request", json={"rid": rid})
        assert (await task).status_code == 200
        return "aborted"
    if kind == 3:
        try:
            body = {"text": text, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
            await client.post("/generate", json=body, timeout=0.02)
        except httpx.TimeoutException:
            return "timed out"
        return "finished"
    if kind == 4:
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 20,
            "stream": True,
        }
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return "chat"
    if kind == 5:
        body = {
            "text": [text, "another"],
            "sampling_params": {**sampling, "n": 2, "stop": ["a", "qu"]},
        }
        response = await client.post("/generate", json=body)
        assert len(response.json()) == 4
        return "batch"
    response = await client.post("/generate", json={"text": text, "sampling_params": sampling})
    assert response.status_code == 200, response.text
    return "good"


async def traffic(url: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=24)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        return await asyncio.gather(*(one(client, i, rng) for i in range(NUM_REQUESTS)))


def test_mixed_requests_leave_nothing_behind() -> None:
    args = ("--model-path", str(tiny_model("qwen3")), "--enable-metrics")
    with ServerProcess(*args, "--max-total-tokens", "1024", plain=True) as server:
        server.wait_ready()
        if BACKENDS:
            # The compiler of grammars is all there once it has answered.
            regex = {"regex": "a", "max_new_tokens": 4}
            server.client.post("/generate", json={"text": "a", "sampling_params": regex})
        asyncio.run(traffic(server.url, 0))
        pids = [server.process.pid, *server.child_pids()]
        assert len(pids) >= 3
        before = [resident_kb(pid) for pid in pids]
        outcomes = [o for seed in (1, 2) for o in asyncio.run(traffic(server.url, seed))]
        assert {"bad", "left", "aborted", "chat", "batch", "good"} <= set(outcomes)
        until(lambda: gauges(server) == dict.fromkeys(IDLE_GAUGES, 0.0))
        after = [resident_kb(pid) for pid in pids]
        grown = [now - then for now, then in zip(after, before, strict=True)]
        assert max(grown) < 24_000, f"grown by {grown} kB"
        # The pool's own books are checked whenever it comes to rest; a flush needs them right.
        assert server.client.post("/flush_cache?timeout=10").status_code == 200
        assert "Traceback" not in server.log
        # Nobody died.
        assert set(pids[1:]) <= set(server.child_pids())
