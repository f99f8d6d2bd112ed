"""Thoughts before an answer: a budget ends them, and a grammar waits for their end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.models.registry import read_model_spec
from runtime.requests.sampling_params import GrammarSpec, ThinkingSpec
from runtime.scheduler.thinking_state import Thinking
from runtime.text.tokenizer import Tokenizer
from tests.support.engine import InProcessEngine
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.tiny_models import tiny_model

PROMPT = [7, 8, 9]
END = [201, 202]
BRIDGE = [203, 204]
FORCED = [*END, *BRIDGE]
DATE = GrammarSpec("regex", r"[12][0-9]{3}-(0[1-9]|1[0-2])-[0-3][0-9]")


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def free(folder: Path) -> list[int]:
    tokens = InProcessEngine(folder).generate(PROMPT, 24, ignore_eos=True)
    assert not set(tokens) & {*END, *BRIDGE}
    return tokens


def run(made: InProcessEngine, max_new_tokens: int = 24, **sampling: Any) -> list[int]:
    made.add(77, PROMPT, max_new_tokens, ignore_eos=True, **sampling)
    made.run()
    return made.tokens[77]


def is_date(folder: Path, tokens: list[int]) -> bool:
    text = Tokenizer.from_folder(folder).backend.decode(tokens)
    return re.fullmatch(DATE.text, text) is not None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_ends_thoughts(folder: Path, free: list[int], budget: int, overlap: bool) -> None:
    made = InProcessEngine(folder, overlap=overlap)
    tokens = run(made, thinking=ThinkingSpec(end_ids=END, forced_ids=FORCED, budget=budget))
    assert tokens[: budget + 4] == [*free[:budget], *FORCED]
    # What follows is what the model makes of it.
    rest = 24 - budget - 4
    context = [*PROMPT, *free[:budget], *FORCED]
    assert tokens[budget + 4 :] == InProcessEngine(folder).generate(context, rest, ignore_eos=True)


def test_thoughts_that_end_in_time_are_left_alone(folder: Path, free: list[int]) -> None:
    # The pair comes as the fifth and sixth token, and its first one before.
    end = free[4:6]
    assert free[3] == free[4] != free[5]
    for budget in (6, 50, None):
        spec = ThinkingSpec(end_ids=end, bridge_ids=BRIDGE, budget=budget, forced_ids=FORCED)
        assert run(InProcessEngine(folder), thinking=spec) == free


def test_an_end_that_has_begun_is_finished(folder: Path, free: list[int]) -> None:
    spec = ThinkingSpec(end_ids=END, forced_ids=[free[2], *END], budget=3)
    assert run(InProcessEngine(folder), thinking=spec)[:5] == [*free[:3], *END]


def test_thoughts_that_may_begin(folder: Path, free: list[int]) -> None:
    # They do not: the output is free, also far behind the budget.
    spec = ThinkingSpec(open_ids=END[:1], end_ids=END, forced_ids=END, budget=2)
    assert run(InProcessEngine(folder), thinking=spec) == free
    # They do.
    spec = ThinkingSpec(open_ids=free[:1], end_ids=END, forced_ids=END, budget=2)
    assert run(InProcessEngine(folder), thinking=spec)[:5] == [*free[:3], *END]
    # Behind a line break, where no grammar holds for that.
    for has_grammar in (False, True):
        thinking = Thinking(spec, has_grammar=has_grammar)
        for token_id in (10, free[0], 30, 31):
            thinking.accept(token_id)
        assert thinking.is_over == has_grammar
        assert thinking.next_ids == ([] if has_grammar else END[:1])


def test_an_answer_that_begins_at_once_has_no_budget(folder: Path, free: list[int]) -> None:
    """Where both begin with a header, the header tells which one it is."""
    spec = ThinkingSpec(
        open_ids=[free[0], END[0]], lead_ids=free[:2], end_ids=END, forced_ids=END, budget=2
    )
    assert run(InProcessEngine(folder), thinking=spec) == free
    # Neither of them.
    spec = msgspec.structs.replace(spec, open_ids=END, lead_ids=BRIDGE)
    assert run(InProcessEngine(folder), thinking=spec) == free
    spec = msgspec.structs.replace(spec, open_ids=free[:3], lead_ids=[free[0], END[0]])
    assert run(InProcessEngine(folder), thinking=spec)[:7] == [*free[:5], *END]


def test_what_follows_ends_thoughts_by_itself(folder: Path, free: list[int]) -> None:
    """A budget cuts nothing that has begun without the mark of an end."""
    assert free[5] not in free[:5]
    spec = ThinkingSpec(end_ids=END, implied_ids=[free[5]], budget=8, forced_ids=END)
    assert run(InProcessEngine(folder), thinking=spec) == free


def test_the_end_of_the_text_stays_forbidden_for_so_long(folder: Path) -> None:
    (eos,) = read_model_spec(folder).eos_token_ids[:1]
    for budget in (3, 50):
        made = InProcessEngine(folder)
        spec = ThinkingSpec(end_ids=END, forced_ids=END, budget=budget)
        made.add(1, PROMPT, 40, thinking=spec, min_new_tokens=12, logit_bias={eos: 99.0})
        made.run()
        assert made.tokens[1].index(eos) == 12
        assert (made.tokens[1][3:5] == END) == (budget == 3)


def test_budgets_beside_others_and_through_retractions(folder: Path, free: list[int]) -> None:
    crowd = InProcessEngine(
        folder, overlap=True, max_total_tokens=16 * 14, page_size=16, chunked_prefill_size=8
    )
    for index in range(12):
        spec = ThinkingSpec(end_ids=END, forced_ids=END, budget=3) if index % 2 else None
        crowd.add(index + 1, PROMPT, 80, ignore_eos=True, thinking=spec)
    crowd.run()
    alone = InProcessEngine(folder)
    limited = run(alone, 80, thinking=ThinkingSpec(end_ids=END, forced_ids=END, budget=3))
    plain = alone.generate(PROMPT, 80, ignore_eos=True)
    for index in range(12):
        assert crowd.tokens[index + 1] == (limited if index % 2 else plain)
    assert crowd.shared["num_retractions_total"] > 0


@needs_grammars
@pytest.mark.parametrize("backend", BACKENDS)
class TestWithGrammar:
    """The answer follows a grammar, its thoughts do not."""

    def test_the_grammar_waits_for_the_end(
        self, folder: Path, free: list[int], backend: str
    ) -> None:
        made = InProcessEngine(folder, grammar_backend=backend)
        spec = ThinkingSpec(end_ids=free[4:6], bridge_ids=BRIDGE)
        tokens = run(made, 60, thinking=spec, grammar=DATE)
        assert tokens[:8] == [*free[:6], *BRIDGE]
        assert is_date(folder, tokens[8:])

    def test_a_budget_leads_to_the_grammar(
        self, folder: Path, free: list[int], backend: str
    ) -> None:
        for options in ({}, {"presence_penalty": 0.5}):
            made = InProcessEngine(folder, grammar_backend=backend)
            spec = ThinkingSpec(end_ids=END, budget=0, forced_ids=FORCED)
            tokens = run(made, 60, thinking=spec, grammar=DATE, **options)
            assert tokens[:4] == [*END, *BRIDGE]
            assert is_date(folder, tokens[4:])

    def test_thoughts_may_come_or_not(self, folder: Path, backend: str) -> None:
        made = InProcessEngine(folder, grammar_backend=backend)
        spec = ThinkingSpec(open_ids=[200], end_ids=END, forced_ids=END, budget=3)
        assert is_date(folder, run(made, 60, thinking=spec, grammar=DATE, logit_bias={200: -99.0}))
        made = InProcessEngine(folder, grammar_backend=backend)
        tokens = run(made, 60, thinking=spec, grammar=DATE, logit_bias={200: 99.0})
        assert tokens[:6] == [200, 200, 200, 200, *END]
        assert is_date(folder, tokens[6:])

    def test_an_answer_without_thoughts_begins_with_its_header(
        self, folder: Path, backend: str
    ) -> None:
        """As with gpt-oss: both begin in the same way, and the grammar holds in either case."""
        spec = ThinkingSpec(
            open_ids=[200, 205],
            lead_ids=[200, *BRIDGE],
            end_ids=END,
            bridge_ids=[206, 200, *BRIDGE],
            budget=3,
            forced_ids=END,
        )
        wish = {"thinking": spec, "grammar": DATE}
        for wanted, start in (
            (BRIDGE[0], [200, *BRIDGE]),
            (205, [200, 205, 205, 205, 205, *END]),
            (207, [200, *BRIDGE]),
        ):
            made = InProcessEngine(folder, grammar_backend=backend)
            banned = {205: -99.0} if wanted == 207 else {}
            tokens = run(made, 60, **wish, logit_bias={wanted: 99.0, **banned})
            assert tokens[: len(start)] == start
            assert is_date(folder, tokens[len(start) :])

    @pytest.mark.parametrize("place", [0, 1])
    def test_the_way_to_the_answer_goes_on_from_where_it_began(
        self, folder: Path, free: list[int], backend: str, place: int
    ) -> None:
        made = InProcessEngine(folder, grammar_backend=backend)
        bridge = [*BRIDGE, 205]
        bridge[place] = free[5]
        spec = ThinkingSpec(end_ids=END, implied_ids=[free[5]], bridge_ids=bridge)
        tokens = run(made, 60, thinking=spec, grammar=DATE)
        start = [*free[:6], *bridge[place + 1 :]]
        assert tokens[: len(start)] == start
        assert is_date(folder, tokens[len(start) :])

    def test_a_token_of_the_answer_ends_thoughts_where_it_may(
        self, folder: Path, backend: str
    ) -> None:
        (letter,) = Tokenizer.from_folder(folder).encode("a", add_special_tokens=False)
        spec = ThinkingSpec(end_ids=END, implied_ids=[letter], budget=9, forced_ids=END)
        for begin, may_come in (("a", True), ("[0-9]", False)):
            made = InProcessEngine(folder, grammar_backend=backend)
            grammar = GrammarSpec("regex", begin + DATE.text)
            tokens = run(made, 60, thinking=spec, grammar=grammar, logit_bias={letter: 99.0})
            if may_come:
                assert tokens[0] == letter
                assert is_date(folder, tokens[1:])
            else:
                # It was a thought, and the grammar holds from its beginning.
                assert tokens[:11] == [*[letter] * 9, *END]
                assert is_date(folder, tokens[12:])
