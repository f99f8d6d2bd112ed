"""Several ranks on the CPU answer as one process does, token for token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from tests.support.grammar_backends import BACKENDS
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model

# A small pool and short chunks: prompts are cut, requests are retracted and computed again.
OPTIONS = (
    "--enable-return-hidden-states",
    *("--num-threads", "1"),
    *("--random-seed", "3"),
    *("--max-total-tokens", "320"),
    *("--chunked-prefill-size", "24"),
    *("--max-running-requests", "6"),
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "sampling_seed": 5},
    {"temperature": 0.8, "sampling_seed": 6, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.1, "sampling_seed": 7, "min_p": 0.02, "frequency_penalty": 0.4},
    {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {"33": 2.0}},
    {"temperature": 0.9, "sampling_seed": 8, "presence_penalty": 0.5, "min_new_tokens": 30},
)
if BACKENDS:
    # Longer than the answer: only rank 0 has the grammar, all of them need its masks.
    SAMPLING += (
        {"temperature": 0, "regex": "[0-9 ]{400}"},
        {"temperature": 1.0, "sampling_seed": 9, "regex": "[a-f]{400}", "top_p": 0.9},
    )


@cache
def _answers(model: str, tp_size: int, ep_size: int = 1) -> list[tuple[list[int], list[float]]]:
    """Each answer's tokens, and its hidden states and entropies where they were asked for."""
    ranks = ("--tp-size", str(tp_size), "--ep-size", str(ep_size))
    server = ServerProcess("--model-path", str(tiny_model(model)), *ranks, *OPTIONS)
    with server:
        server.wait_ready()

        def ask(index: int) -> tuple[list[int], list[float]]:
            text = "The miller opens the gate, the wheel turns, " * (1 + index % 3)
            sampling = {"max_new_tokens": 40, "ignore_eos": True, **SAMPLING[index % len(SAMPLING)]}
            body = {"text": f"{index} {text}", "sampling_params": sampling}
            body["return_hidden_states"] = index % 4 == 0
            body["return_entropy"] = index % 3 == 0
            answer = server.client.post("/generate", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            ids = answer.json()["output_ids"]
            assert len(ids) == 40
            meta = answer.json()["meta_info"]
            prompt, *later = meta.get("hidden_states", [[]])
            entropies = meta.get("output_token_entropy", [])
            assert len(entropies) == (0 if index % 3 else 40)
            return ids, [*(number for row in [*prompt, *later] for number in row), *entropies]

        with ThreadPoolExecutor(12) as pool:
            return list(pool.map(ask, range(12)))


# Of the two key/value heads each of four ranks has a copy of one.
@pytest.mark.parametrize(
    ("model", "tp_size", "ep_size"),
    [
        ("llama", 2, 1),
        ("qwen3", 2, 1),
        ("gemma3", 2, 1),
        ("qwen3_next", 2, 1),
        ("llama", 4, 1),
        ("qwen2_moe", 2, 1),
        ("qwen2_moe", 2, 2),
    ],
)
def test_ranks_give_the_tokens_of_one_process(model: str, tp_size: int, ep_size: int) -> None:
    for (ids, numbers), (wanted, wanted_numbers) in zip(
        _answers(model, tp_size, ep_size), _answers(model, 1), strict=True
    ):
        assert ids == wanted
        assert numbers == pytest.approx(wanted_numbers, abs=1e-3)


def test_with_the_flag_two_ranks_give_the_same_bits_alone_and_together() -> None:
    """Sums over ranks too, through HTTP: log-probabilities are compared to the last digit."""
    options = ("--tp-size", "2", "--enable-deterministic-inference", "--dtype", "bfloat16")
    with ServerProcess("--model-path", str(tiny_model("llama")), *options, *OPTIONS) as server:
        server.wait_ready()

        def ask(index: int) -> tuple[list[int], list[Any]]:
            text = "The miller opens the gate, the wheel turns, " * (1 + index % 3)
            body = {
                "text": f"{index} {text}",
                "sampling_params": {"max_new_tokens": 32, **SAMPLING[index % len(SAMPLING)]},
                "return_logprob": True,
                "top_logprobs_num": index % 3,
            }
            answer = server.client.post("/generate", json=body, timeout=120).json()
            meta = answer["meta_info"]
            return answer["output_ids"], [
                meta["output_token_logprobs"],
                meta.get("output_top_logprobs"),
            ]

        with ThreadPoolExecutor(12) as pool:
            together = list(pool.map(ask, range(12)))
        assert [ask(index) for index in range(12)] == together
        # Without a seed of its own a request draws as it did before.
        free = {"text": "The mill", "sampling_params": {"temperature": 1.5, "max_new_tokens": 16}}
        first, second = (
            server.client.post("/generate", json=free, timeout=120).json()["output_ids"]
            for _ in range(2)
        )
        assert first == second
