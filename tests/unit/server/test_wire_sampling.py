"""The meaning of sampling fields on every wire."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.ollama_api.conftest import make_front

__all__ = ["make_front"]

TURN = [{"role": "user", "content": "Hi"}]
WIRES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURN},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": TURN},
    "/api/chat": {"model": "m", "messages": TURN},
    "/api/generate": {"model": "m", "prompt": "Hi"},
}


def with_option(path: str, **options: Any) -> dict[str, Any]:
    """A request with options of sampling, where its wire has them."""
    return {**WIRES[path], **({"options": options} if path.startswith("/api/") else options)}


@pytest.mark.parametrize("path", WIRES)
async def test_top_k_0_is_off(make_front: Any, path: str) -> None:
    front = make_front(model_defaults={"top_k": 20}, service={"sampling_defaults": {"top_k": 30}})
    for given, meant in ((0, -1), (-1, -1), (5, 5), (None, 30)):
        answer = await front.post(path, with_option(path, top_k=given))
        assert answer.status_code == 200, answer.text
        assert front.engine.requests[-1].spec.sampling.top_k == meant
    refused = await front.post(path, with_option(path, top_k=-2))
    assert refused.status_code == 400
    assert "top_k" in refused.text
