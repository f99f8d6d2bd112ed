"""How much of a step's budget texts use."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from runtime.scheduler.budget import TextCosts

QUERY = list(range(100, 140))


def request(*behind: int, reports: bool = False) -> Any:
    tokens = np.array([*QUERY, *behind], dtype=np.int32)
    return SimpleNamespace(tokens=tokens, reports=[object()] if reports else [])


def test_a_shared_prefix_counts_once() -> None:
    costs = TextCosts(16)
    assert costs.of(request(1, 2)) == costs.add(request(1, 2)) == 42
    # 32 of the query's 40 tokens are already computed.
    assert costs.of(request(3)) == costs.add(request(3)) == 9
    assert costs.of(request(4, 5, 6)) == 11
    # A report covers all tokens, so the other texts compute theirs, too.
    assert costs.of(request(7, reports=True)) == costs.add(request(7, reports=True)) == 41 + 32
    assert costs.of(request(8)) == 41


def test_nothing_is_shared_if_the_model_does_not_share() -> None:
    costs = TextCosts(0)
    assert [costs.add(request(each)) for each in (1, 2)] == [41, 41]
