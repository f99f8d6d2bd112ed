"""Bounds of what a trainer may ask for."""

from __future__ import annotations

import pytest

from runtime.errors import InvalidRequest
from runtime.ipc.weight_messages import JOIN_TIMEOUT_S
from runtime.weights.weight_requests import (
    MAX_NUMBERS_READ,
    ByNameBody,
    InitGroupBody,
    rows_to_read,
    to_join,
)
from tests.support.fake_engine import fake_model_config

EMBEDDINGS = "model.embed_tokens.weight"


@pytest.mark.parametrize("hidden_size", [64, 2**20])
def test_an_answer_holds_so_many_numbers_of_a_weight(hidden_size: int) -> None:
    model = fake_model_config(hidden_size=hidden_size, vocab_size=10**6)
    most = MAX_NUMBERS_READ // hidden_size
    for rows in (1, most):
        assert rows_to_read(ByNameBody(name=EMBEDDINGS, truncate_size=rows), model) == rows
    for rows in (most + 1, 2**62, 0, -1):
        with pytest.raises(InvalidRequest, match=rf"truncate_size must be in \[1, {most}\]"):
            rows_to_read(ByNameBody(name=EMBEDDINGS, truncate_size=rows), model)
    # Nobody who names no number is refused.
    assert rows_to_read(ByNameBody(name=EMBEDDINGS), model) == min(100, most)


def test_a_group_is_waited_for_half_a_minute_by_default() -> None:
    body = InitGroupBody(
        master_address="192.0.2.1", master_port=1, rank_offset=1, world_size=2, backend="gloo"
    )
    assert to_join(body, 1).timeout_s == JOIN_TIMEOUT_S == 30
