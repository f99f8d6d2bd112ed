"""NaN in one sequence ends its request with a clear error and affects no other request."""

from __future__ import annotations

import math

import torch

from runtime.executor.model_runner import NAN_MESSAGE
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model

BAD_TOKEN = 77
PROMPTS = {1: [5, 6, 7], 2: [11, 12, 13, 14], 3: [21] * 20}


def test_one_sequence_ends() -> None:
    # What goes in and what comes out are different matrices in this model.
    folder = tiny_model("llama")
    alone = {n: InProcessEngine(folder).generate(p, 40) for n, p in PROMPTS.items()}
    assert not any(BAD_TOKEN in tokens for tokens in alone.values())
    engine = InProcessEngine(folder, disable_radix_cache=True)
    with torch.no_grad():
        engine.model.model.embed_tokens.weight[BAD_TOKEN] = math.nan
    for round_number in range(2):
        first = 10 * round_number
        for number, prompt in PROMPTS.items():
            engine.add(first + number, prompt, 40)
        engine.add(first + 9, [5, BAD_TOKEN, 7], 40)
        engine.run()
        # The second time in pages that held NaN.
        assert {n: engine.tokens[first + n] for n in PROMPTS} == alone
        reason = engine.reasons[first + 9]
        assert (reason.type, reason.status_code, reason.message) == ("abort", 500, NAN_MESSAGE)
        assert engine.tokens[first + 9] == []
        assert engine.shared["num_nan_requests_total"] == round_number + 1
