"""Requests to which servers with different ranks, nodes or stages must give equal answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.grammar_backends import BACKENDS
from tests.support.server import ServerProcess

NUM_QUESTIONS = 12
# The pool is small and chunks are short, so that prompts are split and requests are put back into
# the queue.
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
    # The grammars need more tokens than an output has. Only rank 0 has a grammar, and all ranks
    # need the tokens that its masks allow.
    SAMPLING += (
        {"temperature": 0, "regex": "[0-9 ]{400}"},
        {"temperature": 1.0, "sampling_seed": 9, "regex": "[a-f]{400}", "top_p": 0.9},
    )


def ask(server: ServerProcess, index: int) -> tuple[list[int], list[float]]:
    """Return the output tokens of a request, and its hidden states and entropies if requested."""
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


def answers(server: ServerProcess) -> list[tuple[list[int], list[float]]]:
    """Send all requests at the same time, and return their answers."""
    with ThreadPoolExecutor(NUM_QUESTIONS) as pool:
        return list(pool.map(lambda index: ask(server, index), range(NUM_QUESTIONS)))
