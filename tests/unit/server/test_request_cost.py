"""The cost of a request is counted and bounded before it runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.service.text_embeddings import embed
from tests.support.fake_engine import FakeEngine, fake_model_config
from tests.support.fake_server import FakeServer
from tests.support.fake_service import fake_service
from tests.support.waiting import until_in_loop

WORDS = [f"{number:04} " * 300 for number in range(1000)]
IDS = [[number % 256, *range(256)] * 8 for number in range(1000)]
BODIES: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "a thousand pages to choose from": (
        "/v1/select",
        {"text": "Which?", "choices": WORDS},
        "choices",
        65536,
    ),
    "the same as ids": ("/v1/select", {"input_ids": [5], "choices": IDS}, "choices", 65536),
    "a thousand pages to score": (
        "/v1/score",
        {"query": [5], "items": IDS, "label_token_ids": [1, 2]},
        "items",
        2**20,
    ),
}


@pytest.mark.parametrize("case", BODIES)
async def test_what_would_take_long_is_refused(tmp_path: Path, case: str) -> None:
    path, body, param, most = BODIES[case]
    server = FakeServer(tmp_path)
    answer = await server.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert f"at most {most} tokens computed for its {param}" in answer.text
    assert "send several requests" in answer.text
    assert not server.engine.requests


async def test_what_all_begin_with_is_counted_once(tmp_path: Path) -> None:
    server = FakeServer(tmp_path)
    page = [*range(256)] * 15
    # 900 pages together, and one with 900 endings of 64 tokens.
    choices = [[number % 256, number // 256, *range(62)] for number in range(900)]
    body = {"input_ids": page, "choices": choices}
    asked = asyncio.create_task(server.client.post("/v1/select", json=body))
    # It is admitted; this engine scores nothing.
    await until_in_loop(lambda: bool(server.engine.requests) or asked.done())
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        pytest.fail((await asked).text)


async def test_texts_of_one_request() -> None:
    engine = FakeEngine()
    engine.client.limits = dataclasses.replace(engine.client.limits, gives="vectors")
    model = dataclasses.replace(fake_model_config(), gives="vectors")
    context = dataclasses.replace(fake_service(engine), model=model)
    with pytest.raises(InvalidRequest, match=r"at most 1048576 tokens computed for its input"):
        await embed(context, [[5] * 513] * 2048)
    assert not engine.requests
