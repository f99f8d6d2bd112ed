"""Runs sixteen different requests alone and together, to compare their results bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.extras.logprobs.positions import LogprobSpec
from tests.support.engine import InProcessEngine

NUM_REQUESTS = 16
SAMPLERS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_k": 5, "seed": 8},
    {"temperature": 1.3, "top_p": 0.7, "seed": 9},
    {"temperature": 1.0, "min_p": 0.05, "top_k": 40, "top_p": 0.9, "seed": 10},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.9, "top_p": 0.8, "seed": 11, "frequency_penalty": 1.0},
    {"logit_bias": {17: 3.0, 40: -5.0}, "min_new_tokens": 12},
]

# The result of a request: tokens, log-probabilities of the output, log-probabilities of the prompt.
Result = tuple[list[int], list[Any], list[Any]]


@dataclass(frozen=True)
class Workload:
    """The sixteen requests. A third of the prompts share a prefix; adjacent ones differ in length.

    Attributes:
        vocab_size: token ids of prompts are below this.
        shared: number of tokens of the common prefix.
        longest: most tokens of a prompt after the common prefix.
        num_new: number of output tokens of each request.
    """

    vocab_size: int = 500
    shared: int = 48
    longest: int = 61
    num_new: int = 20

    def prompt(self, i: int) -> list[int]:
        rng = np.random.default_rng(i)
        length = 1 + 9 * i % 61 * self.longest // 61
        own: list[int] = rng.integers(3, self.vocab_size, length).tolist()
        if i % 3:
            return own
        common = np.random.default_rng(99).integers(3, self.vocab_size, self.shared)
        return [*common.tolist(), *own]

    def spec(self, i: int, *, of_prompt: bool) -> LogprobSpec:
        return LogprobSpec(0 if of_prompt else -1, i % 5, list(range(3, 3 + i % 4)))

    def add(self, engine: InProcessEngine, i: int, first_id: int, *, of_prompt: bool) -> None:
        """Add request `i` to the engine, with the id `first_id + i`."""
        engine.add(
            first_id + i,
            self.prompt(i),
            self.num_new,
            self.spec(i, of_prompt=of_prompt),
            **{"ignore_eos": True, **SAMPLERS[i % len(SAMPLERS)]},
        )

    def one_by_one(self, engine: InProcessEngine) -> list[Result]:
        """Run each request alone."""
        for i in range(NUM_REQUESTS):
            self.add(engine, i, 1, of_prompt=True)
            engine.run()
        return results(engine, 1)

    def together(
        self, engine: InProcessEngine, first_id: int = 1, *, of_prompt: bool = True
    ) -> list[Result]:
        """Run all requests at the same time."""
        for i in range(NUM_REQUESTS):
            self.add(engine, i, first_id, of_prompt=of_prompt)
        engine.run()
        return results(engine, first_id)


def results(engine: InProcessEngine, first_id: int) -> list[Result]:
    ids = range(first_id, first_id + NUM_REQUESTS)
    return [(engine.tokens[i], engine.outputs[i], engine.inputs[i]) for i in ids]


def without_prompts(found: list[Result]) -> list[Result]:
    """Return the results without the log-probabilities of prompts."""
    return [(tokens, outputs, []) for tokens, outputs, _ in found]
