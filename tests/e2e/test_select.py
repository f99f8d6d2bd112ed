"""`/v1/select` over HTTP: choices at exact token boundaries, the prompt computed once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.server import ServerProcess, common_server
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

PAGE = 16
PROMPT = "The miller opens the gate, the wheel turns, and the stones grind"
CHOICES = [" wheat", " barley and oats.", " barley", " barley and oats.", ""]


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return common_server()


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)


def select(server: ServerProcess, **body: Any) -> dict[str, Any]:
    answer = server.client.post("/v1/select", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(server: ServerProcess, text: str) -> list[int]:
    return server.client.post("/tokenize", json={"prompt": text}).json()["tokens"]


def direct(reference: Any, ids: list[int], start: int) -> list[float | None]:
    """Log-probability of each token from `start` on, computed in one piece."""
    if not ids:
        return []
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    known = [logprobs[at - 1, ids[at]].item() for at in range(max(start, 1), len(ids))]
    return [None] * (start == 0) + known


def check(found: list[Any], ids: list[int], expected: list[float | None]) -> None:
    assert [each[1] for each in found] == ids
    for (got, _, _), wanted in zip(found, expected, strict=True):
        assert got == (None if wanted is None else pytest.approx(wanted, abs=1e-3))


def test_the_numbers_are_the_models_own(server, reference):
    answer = select(server, text=PROMPT, choices=CHOICES, unconditional=True, rid="mine")
    start = len(ids_of(server, PROMPT))
    assert answer["id"] == answer["meta_info"]["id"] == "mine"
    assert answer["meta_info"]["prompt_tokens"] == start
    for text, choice in zip(CHOICES, answer["choices"], strict=True):
        ids = ids_of(server, PROMPT + text)
        own = ids[start:]
        check(choice["token_logprobs"], own, direct(reference, ids, start))
        check(choice["unconditional_token_logprobs"], own, direct(reference, own, 0))
        assert "".join(each[2] for each in choice["token_logprobs"]) == text
        assert choice["logprob"] == pytest.approx(sum(e[0] for e in choice["token_logprobs"]))
    total = sum(math.exp(each["logprob"]) for each in answer["choices"])
    for choice in answer["choices"]:
        assert choice["prob"] == pytest.approx(math.exp(choice["logprob"]) / total)
    plain = select(server, text=PROMPT, choices=CHOICES)
    assert {each["unconditional_token_logprobs"] for each in plain["choices"]} == {None}


def test_ids_are_as_good_as_texts(server):
    prompt = ids_of(server, PROMPT)
    ids = [ids_of(server, PROMPT + text)[len(prompt) :] for text in CHOICES]
    texts = select(server, text=PROMPT, choices=CHOICES)["choices"]
    for body in (
        {"input_ids": prompt, "choices": ids},
        {"text": PROMPT, "choices": [*ids[:2], *CHOICES[2:]]},
        {"input_ids": prompt, "choices": CHOICES},
    ):
        for mine, theirs in zip(select(server, **body)["choices"], texts, strict=True):
            check(mine["token_logprobs"], *_columns(theirs["token_logprobs"]))


def _columns(triples: list[Any]) -> tuple[list[int], list[float | None]]:
    return [each[1] for each in triples], [each[0] for each in triples]


def test_a_blank_that_belongs_to_a_word_counts_for_every_choice(server, reference):
    prompt = PROMPT + " "
    own = ids_of(server, prompt)
    healed, apart = ids_of(server, prompt + "wheat"), ids_of(server, prompt + "\t7")
    start = len(own) - 1
    assert healed[:start] == own[:start] == apart[:start]
    assert healed[start] != own[start], "the blank has gone into the word's token"
    answer = select(server, text=prompt, choices=["wheat", "\t7"])
    for ids, choice in zip((healed, apart), answer["choices"], strict=True):
        check(choice["token_logprobs"], ids[start:], direct(reference, ids, start))


@pytest.mark.parametrize("prompt", ["", "a"])
def test_short_prompts(server, reference, prompt):
    start = len(ids_of(server, prompt))
    answer = select(server, text=prompt, choices=["wheat", "", "7"], unconditional=True)
    for text, choice in zip(("wheat", "", "7"), answer["choices"], strict=True):
        ids = ids_of(server, prompt + text)
        check(choice["token_logprobs"], ids[start:], direct(reference, ids, start))
    assert math.isfinite(sum(each["prob"] for each in answer["choices"]))


def counted(server: ServerProcess, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return sum(float(each.split()[-1]) for each in lines if each.startswith(f"sglang:{name}"))


def test_the_prompt_is_computed_once(server):
    server.client.post("/flush_cache?timeout=10").raise_for_status()
    before = [counted(server, name) for name in ("prompt_tokens_total", "cached_tokens_total")]
    prompt = "A prompt that nobody has asked before, long enough for a good many pages: " * 4
    length = len(ids_of(server, prompt))
    texts = ["one of them", "another of the choices", "a third that goes on for a while"]
    meta = select(server, text=prompt, choices=texts)["meta_info"]
    own = sum(len(ids_of(server, prompt + text)) - length for text in texts)
    assert meta["cached_tokens"] == 0
    # Of each further choice at most what lies beside the last whole page.
    assert length < meta["computed_tokens"] <= length + own + 2 * PAGE
    after = [counted(server, name) for name in ("prompt_tokens_total", "cached_tokens_total")]
    told, cached = (new - old for new, old in zip(after, before, strict=True))
    assert told - cached == meta["computed_tokens"]
    # Choices that are a token each are read off the prompt itself.
    again = select(server, text=prompt + "!", choices=[[each] for each in range(5, 25)])
    assert again["meta_info"]["computed_tokens"] <= 2 * PAGE
    assert length - PAGE <= again["meta_info"]["cached_tokens"] <= length


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"text": "a"}, "missing required field `choices`"),
        ({"text": "a", "choices": []}, "1 to 1000 entries"),
        ({"text": "a", "choices": ["b"] * 1001}, "1 to 1000 entries"),
        ({"choices": ["b"]}, "Exactly one of text and input_ids"),
        ({"text": "a", "input_ids": [1], "choices": ["b"]}, "Exactly one of text and input_ids"),
        ({"text": "a", "choices": [[VOCAB_SIZE + 9999]]}, "choices must be in [0,"),
        ({"input_ids": [-1], "choices": ["b"]}, "input_ids must be in [0,"),
        ({"text": "a", "choices": [5]}, "`$.choices[0]`"),
        ({"input_ids": [5] * 100_000, "choices": ["b"]}, "longer than"),
        ({"input_ids": [5] * 100_000, "choices": ["b"] * 1000}, "tokens together"),
    ],
)
def test_refusals(server, body, word):
    answer = server.client.post("/v1/select", json=body)
    assert answer.status_code == 400, answer.text
    assert word in answer.text
