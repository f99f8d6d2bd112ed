"""`outlines`: its models for OpenAI, vLLM and SGLang servers."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from tests.clients.scenarios import CAPITAL, MODEL, SUM, Place, Total, need

outlines = need("outlines", "outlines")


@pytest.fixture(params=["from_openai", "from_vllm", "from_sglang"])
def model(request: pytest.FixtureRequest, openai_url: str) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=openai_url, api_key="none", max_retries=0)
    return getattr(outlines, request.param)(client, MODEL)


SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 100}


def test_a_class(model: Any) -> None:
    assert Total.model_validate_json(model(SUM, Total, **SETTINGS)) == Total(total=15)
    text = "".join(model.stream(CAPITAL, Place, **SETTINGS))
    assert json.loads(text)["city"] in ("Oslo", "Quito")


def test_a_choice_a_regex_and_a_grammar(openai_url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=openai_url, api_key="none", max_retries=0)
    vllm, sglang = outlines.from_vllm(client, MODEL), outlines.from_sglang(client, MODEL)
    for model in (vllm, sglang):
        assert model(CAPITAL, Literal["Oslo", "Quito"], **SETTINGS) in ("Oslo", "Quito")
        assert model(CAPITAL, outlines.regex("[0-9]{3}"), **SETTINGS).isdigit()
    grammar = outlines.cfg('root ::= "Oslo" | "Quito"')
    assert sglang(CAPITAL, grammar, **SETTINGS) in ("Oslo", "Quito")


def test_text(model: Any) -> None:
    assert "Paris" in model(CAPITAL, **SETTINGS)
    assert "Paris" in "".join(model.stream(CAPITAL, **SETTINGS))
