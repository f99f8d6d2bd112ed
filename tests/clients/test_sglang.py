"""The reference's `bench_serving` and its frontend language, from the wheel of `sglang` 0.5.9."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.demo import MODEL_PATH
from tests.clients.scenarios import CAPITAL, INSTRUCTIONS, need, succeed

sgl = need("sglang", "sglang")


@pytest.fixture
def backend(url: str) -> Any:
    endpoint = sgl.RuntimeEndpoint(url, chat_template_name="chatml")
    sgl.set_default_backend(endpoint)
    return endpoint


@sgl.function
def ask(s: Any, question: str) -> None:
    s += sgl.system(INSTRUCTIONS)
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=40, temperature=0))


@sgl.function
def choose(s: Any) -> None:
    s += "The capital of France is"
    s += sgl.select("city", [" Oslo", " Paris", " Tokyo"])


@sgl.function
def constrained(s: Any) -> None:
    s += "Date: " + sgl.gen("month", regex="[0-9]{4}-[0-9]{2}", max_tokens=20)
    s += " " + sgl.gen("number", dtype=int, max_tokens=8)


@sgl.function
def forked(s: Any) -> None:
    s += "The capital of"
    branches = s.fork(2)
    for branch, country in zip(branches, ("France", "Japan"), strict=True):
        branch += f" {country} is" + sgl.gen("city", max_tokens=4, temperature=0)
    branches.join()
    s += " ".join(branch["city"] for branch in branches)


def test_the_frontend_asks_streams_and_batches(backend: Any) -> None:
    whole = ask.run(question=CAPITAL)
    assert "Paris" in whole["answer"]
    stream = ask.run(question=CAPITAL, stream=True)
    assert "".join(stream.text_iter("answer")) == whole["answer"]
    questions = [f"What is the capital of {country}?" for country in ("Japan", "Norway")]
    states = ask.run_batch([{"question": question} for question in questions])
    for state, city in zip(states, ("Tokyo", "Oslo"), strict=True):
        assert city in state["answer"]


def test_the_frontend_selects_constrains_and_forks(backend: Any) -> None:
    chosen = choose.run()
    assert chosen["city"] == " Paris"
    assert len(chosen.get_meta_info("city")["normalized_prompt_logprobs"]) == 3
    state = constrained.run()
    year, _, month = state["month"].partition("-")
    assert (len(year), len(month)) == (4, 2)
    int(state["number"])
    assert {"Paris.", "Tokyo."} <= set(forked.run().text().split())


def test_the_endpoint_flushes_caches_and_tells(backend: Any) -> None:
    backend.cache_prefix("Once upon a time")
    backend.flush_cache()
    assert backend.get_model_name() == str(MODEL_PATH)
    assert backend.get_server_info()["max_total_num_tokens"] > 0


@pytest.mark.parametrize("kind", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_bench_serving(url: str, kind: str, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", kind]
    command += ["--base-url", url, "--model", str(MODEL_PATH), "--dataset-name", "random-ids"]
    command += ["--random-input-len", "32", "--random-output-len", "8"]
    command += ["--random-range-ratio", "1", "--num-prompts", "12", "--max-concurrency", "4"]
    command += ["--return-logprob", "--flush-cache", "--output-file", str(report), "--disable-tqdm"]
    succeed(command)
    (figures,) = [json.loads(line) for line in report.read_text().splitlines()]
    assert figures["completed"] == 12
    assert figures["total_output_tokens"] == 12 * 8
    assert figures["mean_ttft_ms"] > 0
