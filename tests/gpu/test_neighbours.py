"""A request gets the same tokens alone and among others of every kind that come and go."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from runtime.extras.logprobs.positions import LogprobSpec
from runtime.ipc.messages import AbortRequests, FlushCache
from runtime.requests.sampling_params import GrammarSpec
from runtime.text.tokenizer import Tokenizer
from tests.support.engine import HiddenMode, InProcessEngine
from tests.support.gpu import count_graphs, in_both_precisions, prompt, small_engine
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.tiny_models import tiny_model

pytestmark = [pytest.mark.also_cpu(asked=True), in_both_precisions]

MODEL = "llama"
NUM_NEW = 24
DIGITS = "[0-9 ]{300}"
WORDS = "([a-f]{3} ){100}"


@dataclass
class Asked:
    """A request; `abort_after` steps it is ended from outside."""

    ids: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    logprobs: LogprobSpec | None = None
    hidden: HiddenMode = ""
    grammar: str = ""
    abort_after: int | None = None


PROBES = [Asked(prompt(n, 20 + n)) for n in (9, 40, 150)]
PROBES += [Asked(prompt(30, 7), {"temperature": 1.0, "seed": 11})]
NEIGHBOURS = [
    Asked(prompt(12, 1), {"temperature": 1.0, "seed": 1}),
    Asked(prompt(50, 2), {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2}),
    Asked(prompt(7, 3), {"temperature": 1.2, "min_p": 0.05, "seed": 3}, LogprobSpec(0, 5, [9])),
    Asked(prompt(33, 4), {"frequency_penalty": 0.7, "presence_penalty": 0.3}),
    Asked(prompt(21, 5), {"repetition_penalty": 1.4, "temperature": 1.0, "seed": 4}),
    Asked(prompt(64, 6), {"logit_bias": {7: 3.0, 11: -50.0, 33: 1.5}}),
    Asked(prompt(5, 7), {"logit_bias": {40: 100.0}, "temperature": 1.0, "seed": 5}),
    Asked(prompt(18, 8), {"min_new_tokens": 20, "stop_token_ids": list(range(3, 250))}),
    Asked(prompt(140, 9), {}, LogprobSpec(0, 2), "all"),
    Asked(prompt(70, 10), {}, None, "last"),
    Asked(prompt(25, 11), {"temperature": 0.9, "seed": 6}, abort_after=2),
    Asked(prompt(90, 12), {}, abort_after=1),
    Asked(prompt(11, 13), {"frequency_penalty": 1.0}, abort_after=9),
    Asked(prompt(16, 14), {"temperature": 0.0}, grammar=DIGITS),
    Asked(prompt(31, 15), {"temperature": 1.0, "seed": 7}, grammar=WORDS),
    Asked(prompt(13, 16), {"logit_bias": {40: 100.0}}, grammar=DIGITS, abort_after=6),
]


def add(engine: InProcessEngine, number: int, asked: Asked) -> None:
    sampling = dict(asked.sampling)
    if asked.grammar and BACKENDS:
        sampling["grammar"] = GrammarSpec("regex", asked.grammar)
    elif asked.grammar:
        # Masks of another kind: all but a few tokens are out of the question.
        sampling["logit_bias"] = dict.fromkeys(range(30, 60), 100.0)
    # Where the end may come, it may come at different steps alone and in company.
    ignore_eos = "stop_token_ids" not in sampling
    engine.add(
        number, asked.ids, NUM_NEW, asked.logprobs, asked.hidden, ignore_eos=ignore_eos, **sampling
    )


def made_engine(**options: Any) -> InProcessEngine:
    return small_engine(
        tiny_model(MODEL),
        enable_return_hidden_states=True,
        grammar_backend=BACKENDS[0] if BACKENDS else "none",
        **options,
    )


@pytest.fixture(scope="module")
def engine(graphs: None) -> InProcessEngine:
    return made_engine()


@pytest.fixture(scope="module")
def alone(engine: InProcessEngine) -> list[list[int]]:
    """Tokens of each probe and of each neighbour that is not aborted, one after the other."""
    found = []
    for asked in [*PROBES, *NEIGHBOURS]:
        number = max(engine.tokens, default=0) + 1
        if asked.abort_after is None:
            add(engine, number, asked)
            engine.run()
            found.append(engine.tokens[number])
        else:
            found.append([])
    return found


def run_together(engine: InProcessEngine, order: list[int]) -> dict[int, list[int]]:
    """Let all come in turn, a step apart; by place in the list, the tokens of those that end."""
    everybody = [*PROBES, *NEIGHBOURS]
    first = max(engine.tokens, default=0) + 1
    aborts: dict[int, list[int]] = {}
    for turn, place in enumerate(order):
        asked = everybody[place]
        add(engine, first + place, asked)
        if asked.abort_after is not None:
            aborts.setdefault(turn + asked.abort_after, []).append(first + place)
        engine.scheduler.step()
        engine.scheduler.receive([AbortRequests(aborts.pop(turn, []))])
    turn = len(order)
    while engine.scheduler.has_work:
        engine.scheduler.receive([AbortRequests(aborts.pop(turn, []))])
        engine.scheduler.step()
        turn += 1
    engine.scheduler.rest()
    for place, asked in enumerate(everybody):
        if asked.abort_after is not None:
            assert engine.reasons[first + place].type == "abort"
    return {place: engine.tokens[first + place] for place in range(len(everybody))}


ORDERS = {
    "probes first": list(range(20)),
    "probes last": [*range(4, 20), *range(4)],
    "mixed": [12, 17, 0, 5, 8, 1, 13, 19, 10, 2, 4, 18, 3, 9, 6, 15, 7, 11, 16, 14],
}


@pytest.mark.parametrize("order", ORDERS)
def test_nobody_feels_the_others(
    engine: InProcessEngine,
    alone: list[list[int]],
    order: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = count_graphs(engine, monkeypatch)
    # Once with an empty cache, once with all prompts in it.
    engine.scheduler.receive([FlushCache(0)])
    for _ in range(2):
        found = run_together(engine, ORDERS[order])
        for place, expected in enumerate(alone):
            if expected:
                assert found[place] == expected, place
    assert counts["decode"] > 0
    assert counts["prompt"] > 0


def test_nor_do_they_when_pages_run_out(graphs: None, alone: list[list[int]]) -> None:
    engine = made_engine(max_total_tokens=16 * 20)
    found = run_together(engine, ORDERS["mixed"])
    for place, expected in enumerate(alone):
        if expected:
            assert found[place] == expected, place
    assert engine.scheduler._planner.num_retractions > 0


@needs_grammars
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_follow_their_grammars_while_steps_overlap(graphs: None, backend: str) -> None:
    folder = tiny_model(MODEL)
    engine = small_engine(folder, grammar_backend=backend)
    decode = Tokenizer.from_folder(folder).backend.decode
    patterns = ["[0-9]{2,9}", "(yes|no)", "[A-Z][a-z]{3,8}!", "(ab|cd){2,6}"]
    for number in range(1, 25):
        spec = GrammarSpec("regex", patterns[number % 4])
        options: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 3 else {}
        # Every other one is free: they share each step.
        grammar = {"grammar": spec} if number % 2 else {}
        engine.add(number, prompt(3 + number, number), NUM_NEW, **options, **grammar)
        engine.scheduler.step()
    engine.run()
    for number in range(1, 25, 2):
        assert engine.reasons[number].type == "stop"
        assert re.fullmatch(patterns[number % 4], decode(engine.tokens[number])), number
