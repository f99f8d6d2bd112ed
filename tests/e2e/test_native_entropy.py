"""`return_entropy` over HTTP and in the offline engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import headrace as sgl
from tests.support.native import GREEDY, TEXT, generate, refused, stream, tokenize
from tests.support.server import ServerProcess, running_server
from tests.support.tiny_models import tiny_model

SHORT = {**GREEDY, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return running_server("qwen3", "--chunked-prefill-size", "16")


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    made = sgl.Engine(model_path=str(tiny_model("qwen3")), grammar_backend="none")
    yield made
    made.shutdown()


@cache
def reference_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32).eval()


def expected(prompt: list[int], output: list[int]) -> Any:
    with torch.no_grad():
        logits = reference_model()(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    entropies = torch.distributions.Categorical(logits=logits.double()).entropy()
    return pytest.approx(entropies.tolist(), abs=1e-3)


def values(answer: dict[str, Any]) -> list[float]:
    found: list[float] = answer["meta_info"]["output_token_entropy"]
    return found


def test_whole_and_streamed(server: ServerProcess) -> None:
    asked = {"text": TEXT, "sampling_params": SHORT, "return_entropy": True}
    whole = generate(server, **asked)
    assert values(whole) == expected(tokenize(server, TEXT), whole["output_ids"])
    assert "output_token_logprobs" not in whole["meta_info"]
    for event in (events := stream(server, **asked)):
        assert len(values(event)) == len(event["output_ids"])
    assert values(events[-1]) == pytest.approx(values(whole), abs=1e-5)


def test_for_every_sample_of_a_batch(server: ServerProcess) -> None:
    sampling = {"temperature": 1.2, "max_new_tokens": 5, "ignore_eos": True, "n": 2}
    answers = generate(server, text=[TEXT, "wheat"], sampling_params=sampling, return_entropy=True)
    for answer, text in zip(answers, [TEXT, TEXT, "wheat", "wheat"], strict=True):
        assert values(answer) == expected(tokenize(server, text), answer["output_ids"])


def test_beside_log_probabilities_and_cut_where_a_stop_string_cuts(server: ServerProcess) -> None:
    asked = {"text": TEXT, "return_entropy": True, "return_logprob": True}
    whole = generate(server, **asked, sampling_params=SHORT)
    stop = {**SHORT, "stop": [whole["text"][3:6]]}
    cut = generate(server, **asked, sampling_params=stop)
    kept = len(cut["output_ids"])
    assert 0 < kept < len(whole["output_ids"])
    assert values(cut) == pytest.approx(values(whole)[:kept], abs=1e-5)
    assert len(cut["meta_info"]["output_token_logprobs"]) == kept


def test_nothing_generated_tells_of_the_next_token(server: ServerProcess) -> None:
    asked = {"text": TEXT, "return_entropy": True}
    nothing = generate(server, **asked, sampling_params={**SHORT, "max_new_tokens": 0})
    assert nothing["output_ids"] == []
    first = values(generate(server, **asked, sampling_params=SHORT))[:1]
    assert values(nothing) == pytest.approx(first, abs=1e-5)


def test_off_and_wrong(server: ServerProcess) -> None:
    for off in ({}, {"return_entropy": False}, {"return_entropy": None}):
        plain = generate(server, text=TEXT, sampling_params=SHORT, **off)
        assert "output_token_entropy" not in plain["meta_info"]
    assert "return_entropy" in refused(server, text=TEXT, return_entropy="yes")


def test_in_the_engine(engine: sgl.Engine) -> None:
    whole = engine.generate(TEXT, SHORT, return_entropy=True)
    assert len(values(whole)) == 8
    # Its chunks hold what is new.
    chunks = engine.generate(TEXT, SHORT, stream=True, return_entropy=True)
    streamed = [value for chunk in chunks for value in values(chunk)]
    assert streamed == pytest.approx(values(whole), abs=1e-5)
