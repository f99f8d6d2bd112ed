"""Which prompts score several continuations, and that each token's own number is read."""

from __future__ import annotations

import random
from array import array

import pytest

from runtime.extras.logprobs.positions import LogprobRows, LogprobSpec
from runtime.service.choices import ChoicePlan
from runtime.service.prefills import Prefill


def logprob(before: list[int], token: int) -> float:
    """Of a model that knows all tokens before."""
    return -1.0 - random.Random(f"{before} {token}").random()


def rows(ids: list[int], at: list[int], labels: list[int], chosen: list[int]) -> LogprobRows:
    """What is known at each position of `at`: of the token in `chosen`, and of the labels."""
    own = [logprob(ids[:end], token) for end, token in zip(at, chosen, strict=True)]
    asked = [logprob(ids[:end], label) for end in at for label in labels]
    return LogprobRows(array("f", own), array("f"), array("i"), array("f", asked))


def computed(ids: list[int], spec: LogprobSpec) -> Prefill:
    """What the engine gives for a prompt."""
    at = list(range(spec.start_len + 1, len(ids))) if spec.start_len >= 0 else []
    inputs = rows(ids, at, spec.token_ids, [ids[end] for end in at])
    return Prefill(inputs, rows(ids, [len(ids)], spec.token_ids, [0]), 0, "v")


def scored(sequences: list[list[int]], start: int) -> tuple[list[list[float | None]], int]:
    plan = ChoicePlan(sequences, start)
    prompts = plan.prompts()
    return plan.read([computed(*each) for each in prompts]), len(prompts)


def check(sequences: list[list[int]], start: int) -> int:
    found, num_prompts = scored(sequences, start)
    for sequence, values in zip(sequences, found, strict=True):
        wanted = [
            None if end == 0 else pytest.approx(logprob(sequence[:end], sequence[end]), abs=1e-6)
            for end in range(start, len(sequence))
        ]
        assert values == wanted
    return num_prompts


@pytest.mark.parametrize("start", [0, 1, 2, 5])
def test_every_token_is_read_where_it_is_known(start: int) -> None:
    rng = random.Random(start)
    head = [rng.randrange(100) for _ in range(start)]
    for _ in range(200):
        # Few ids, so that many choices share a beginning, or are the beginning of others.
        tails = [[rng.randrange(3) for _ in range(rng.randrange(5))] for _ in range(6)]
        check([head + tail for tail in tails], start)


def test_no_prompt_is_computed_that_another_one_holds() -> None:
    head = [7, 8, 9]
    assert check([[*head, token] for token in range(50)], 3) == 1
    assert check([[*head, 1, 2], [*head, 1, 2, 3], [*head, 1], [*head, 1, 2]], 3) == 1
    assert check([[*head, 1, 2], [*head, 2, 2], [*head, 3]], 3) == 2
    assert check([head, head], 3) == 0
    assert check([[1], [2]], 0) == 0
