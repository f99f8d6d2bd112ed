"""The downloaded demo model, served, answers in sentences, as a new user sees it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.demo.fetch import SMOLLM2
from tests.support.server import ServerProcess

# The README's and the quick start's questions, and what their answers hold.
QUESTIONS = {
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What is 2 * 2?": "2 * 2 = 4",
    "List 3 countries and their capitals.": "1. ",
    "Why is the sky blue?": "Rayleigh scattering",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    if not SMOLLM2.path.is_file():
        pytest.skip(f"no {SMOLLM2.path}: python -m headrace.demo.fetch")
    with ServerProcess("--model-path", "demo") as made:
        yield made.wait_ready()


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_pages_questions_get_sentences(question: str, server: ServerProcess) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 100,
    }
    answer = server.client.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert QUESTIONS[question] in answer["choices"][0]["message"]["content"]


def test_it_says_which_model_it_is(server: ServerProcess) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "SmolLM2-135M-Instruct"
    assert "model    SmolLM2-135M-Instruct (LlamaForCausalLM)" in server.log
    info = server.client.get("/model_info").json()
    assert info["preferred_sampling_params"] == {"temperature": 0.2, "top_p": 0.9}
