"""A request that goes on in another worker gives the rest of the undisturbed output."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from runtime.extras.logprobs.positions import LogprobSpec
from runtime.requests.sampling_params import GrammarSpec, ThinkingSpec
from tests.support.engine import InProcessEngine
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.tiny_models import tiny_model

NUM_TOKENS = 24
PROMPT = [7, 11, 13, 17] * 5
FREE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3, "top_k": 20},
    {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {33: 2.0}, "min_new_tokens": 20},
    {
        "temperature": 0.9,
        "seed": 4,
        "thinking": ThinkingSpec(end_ids=[9], budget=12, forced_ids=[8, 9]),
    },
    {"hidden_states": "all"},
    {"hidden_states": "last"},
    {"logprobs": LogprobSpec(start_len=0, top_num=2)},
]


@cache
def engine(*, overlap: bool) -> InProcessEngine:
    backend = BACKENDS[0] if BACKENDS else "none"
    return InProcessEngine(
        tiny_model("qwen3"), overlap=overlap, chunked_prefill_size=16, grammar_backend=backend
    )


def run_all(overlap: bool, asked: list[dict[str, Any]]) -> tuple[InProcessEngine, list[int]]:
    worker = engine(overlap=overlap)
    first = max(worker.tokens, default=0) + 1
    for number, each in enumerate(asked, first):
        worker.add(number, PROMPT, NUM_TOKENS, **each)
    worker.run()
    return worker, list(range(first, first + len(asked)))


def check(overlap: bool, asked: list[dict[str, Any]]) -> None:
    worker, whole = run_all(overlap, asked)
    for cut in (0, 1, 9, NUM_TOKENS - 1):
        again = []
        for each, number in zip(asked, whole, strict=True):
            sent = worker.tokens[number][:cut]
            again.append({**each, "output_ids": sent[: max(0, len(worker.tokens[number]) - 1)]})
        _, resumed = run_all(overlap, again)
        for each, before, after in zip(again, whole, resumed, strict=True):
            num_sent = len(each["output_ids"])
            assert worker.tokens[after] == worker.tokens[before][num_sent:]
            assert worker.reasons[after] == worker.reasons[before]
            if "logprobs" in each:
                # Reports of the prompt come once, those of the output with their tokens.
                assert len(worker.inputs[after]) == (0 if num_sent else len(PROMPT) - 1)
                found = [each.logprob for each in worker.outputs[after]]
                wanted = [each.logprob for each in worker.outputs[before]][num_sent:]
                assert found == pytest.approx(wanted, abs=1e-4)
            if each.get("hidden_states") == "all":
                assert len(worker.hidden_inputs[after]) == (0 if num_sent else len(PROMPT) - 1)
                assert len(worker.hidden_outputs[after]) == NUM_TOKENS - num_sent
                for found_row, row in zip(
                    worker.hidden_outputs[after],
                    worker.hidden_outputs[before][num_sent:],
                    strict=True,
                ):
                    assert found_row == pytest.approx(row, abs=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_rest_is_the_same(overlap: bool) -> None:
    check(overlap, FREE)


@needs_grammars
@pytest.mark.parametrize("overlap", [False, True])
def test_grammars_and_thoughts_are_followed_from_where_they_were(overlap: bool) -> None:
    regex = GrammarSpec("regex", "[a-d]{3}-([0-9]{2},)*[x-z]{40}")
    thinking = ThinkingSpec(end_ids=[9], budget=5, forced_ids=[8, 9])
    check(
        overlap,
        [
            {"grammar": regex},
            {"grammar": regex, "temperature": 0.9, "seed": 3},
            {"grammar": regex, "temperature": 0.9, "seed": 3, "thinking": thinking},
        ],
    )
