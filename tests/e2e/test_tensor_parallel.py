"""Several ranks on the CPU answer as one process does, token for token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from tests.support.same_answers import OPTIONS, SAMPLING, answers
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model


@cache
def _answers(
    model: str, tp_size: int, ep_size: int = 1, pp_size: int = 1
) -> list[tuple[list[int], list[float]]]:
    """Each answer's tokens, and its hidden states and entropies where they were asked for."""
    ranks = ("--tp-size", str(tp_size), "--ep-size", str(ep_size), "--pp-size", str(pp_size))
    server = ServerProcess("--model-path", str(tiny_model(model)), *ranks, *OPTIONS)
    with server:
        server.wait_ready()
        return answers(server)


# Of the two key/value heads each of four ranks has a copy of one.
@pytest.mark.parametrize(
    ("model", "tp_size", "ep_size", "pp_size"),
    [
        ("llama", 2, 1, 1),
        ("qwen3", 2, 1, 1),
        ("gemma3", 2, 1, 1),
        ("qwen3_next", 2, 1, 1),
        ("llama", 4, 1, 1),
        ("qwen2_moe", 2, 1, 1),
        ("qwen2_moe", 2, 2, 1),
        ("qwen2_moe", 2, 2, 2),
        pytest.param("llama", 1, 1, 3, marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_tokens_of_one_process(
    model: str, tp_size: int, ep_size: int, pp_size: int
) -> None:
    for (ids, numbers), (wanted, wanted_numbers) in zip(
        _answers(model, tp_size, ep_size, pp_size), _answers(model, 1), strict=True
    ):
        assert ids == wanted
        assert numbers == pytest.approx(wanted_numbers, abs=1e-3)


@pytest.mark.parametrize("ranks", ["--tp-size", pytest.param("--pp-size", marks=pytest.mark.slow)])
def test_with_the_flag_two_ranks_give_the_same_bits_alone_and_together(ranks: str) -> None:
    """Sums over ranks too, through HTTP: log-probabilities are compared to the last digit."""
    options = (ranks, "2", "--enable-deterministic-inference", "--dtype", "bfloat16")
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
