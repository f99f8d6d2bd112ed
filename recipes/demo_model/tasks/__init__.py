"""The skills of the demo model: one sample generator each, and its weight."""

from collections.abc import Callable, Iterator
from random import Random

from recipes.demo_model.conversation import PlainText, Question, Sample
from recipes.demo_model.phrasing import made_up_word
from recipes.demo_model.tasks import (
    arithmetic,
    calendar,
    compose,
    geography,
    identity,
    json_output,
    knowledge,
    lexical,
    lists,
    plain_text,
    programs,
    tool_calls,
)
from recipes.demo_model.words import NAMES

SampleMaker = Callable[[Random], Sample]

QUESTIONS: dict[str, tuple[float, Callable[[Random], Question]]] = {
    "capital": (10, geography.capital),
    "country of capital": (2.5, geography.country_of_capital),
    "where is": (1, geography.where_is),
    "is capital": (1.5, geography.is_capital),
    "continent": (2, geography.continent),
    "currency": (1.2, geography.currency),
    "language": (1.2, geography.language),
    "population": (1, geography.population),
    "operation": (15, arithmetic.operation),
    "story problem": (2, arithmetic.story_problem),
    "comparison": (2, arithmetic.comparison),
    "extreme": (2, arithmetic.extreme),
    "parity": (1, arithmetic.parity),
    "counting": (2.5, arithmetic.counting),
    "neighbour": (2, calendar.neighbour),
    "tomorrow": (0.7, calendar.tomorrow),
    "month": (0.7, calendar.month_number),
    "series": (0.7, calendar.series),
    "planet": (0.4, calendar.planet),
    "opposite": (1.5, lexical.opposite),
    "colour": (1, lexical.colour),
    "inflection": (1.2, lexical.inflection),
    "translation": (1.5, lexical.translation),
    "copy": (5, lexical.copy),
    "test": (0.3, lexical.this_is_a_test),
    "case": (4, lexical.change_case),
    "spelling": (4, lexical.spelling),
    "sentiment": (1, lexical.sentiment),
    "extraction": (1.5, lexical.extraction),
    "number word": (0.5, lexical.number_word),
    "context": (3, lexical.from_context),
    "small talk": (3, identity.small_talk),
    "greeting": (0.6, identity.greeting_by_name),
    "unknown": (1.5, identity.unknown),
    "unknown country": (0.8, identity.unknown_country),
    "trivia": (6, knowledge.trivia),
    "definition": (4, knowledge.definition),
    "creative": (2.5, knowledge.creative),
    "advice": (1.2, knowledge.advice),
    "code": (1, knowledge.code),
}
_NAMES = list(QUESTIONS)
_WEIGHTS = [weight for weight, _ in QUESTIONS.values()]


def question(rng: Random) -> Question:
    """A question of any skill."""
    name = rng.choices(_NAMES, _WEIGHTS)[0]
    return QUESTIONS[name][1](rng)


def _answerable(rng: Random) -> Question:
    """A question that the model can answer and for which no tool would help."""
    while True:
        name = rng.choices(_NAMES, _WEIGHTS)[0]
        if name != "unknown":
            return QUESTIONS[name][1](rng)


def _one(rng: Random) -> Sample:
    return compose.single(rng, question(rng))


def _several(rng: Random) -> Sample:
    return compose.several(rng, question)


def _long(rng: Random) -> Sample:
    return compose.several(rng, question, turns=rng.randint(8, 40))


def _recall(rng: Random) -> Sample:
    name = rng.choice(NAMES) if rng.random() < 0.5 else made_up_word(rng).capitalize()
    return compose.recall(rng, question, name)


def _begun(rng: Random) -> Sample:
    return programs.begun_answer(rng, question(rng))


def _no_call(rng: Random) -> Sample:
    return tool_calls.no_call(rng, _answerable)


def _plain_question(rng: Random) -> Sample:
    found = question(rng)
    return PlainText(f"{found.text}\n{found.answer}")


SAMPLES: dict[str, tuple[float, SampleMaker]] = {
    "question": (46, _one),
    "several": (9, _several),
    "long": (0.5, _long),
    "follow up": (3, compose.follow_up),
    "recall": (0.7, _recall),
    "countries and capitals": (4, lists.countries_and_capitals),
    "things": (4, lists.things),
    "by continent": (0.7, lists.by_continent),
    "capital in JSON": (2, json_output.capital_in_json),
    "chosen keys": (2, json_output.chosen_keys),
    "information": (1, json_output.information),
    "forced by grammar": (1.5, json_output.forced_by_grammar),
    "person": (0.3, json_output.person),
    "character": (0.4, json_output.character),
    "begun answer": (2, _begun),
    "tool choice": (0.8, programs.tool_choice),
    "tips": (0.4, programs.tips),
    "tool call": (12, tool_calls.call),
    "tool result": (3.5, tool_calls.after_result),
    "no tool call": (3, _no_call),
    "country text": (3, plain_text.country_text),
    "begun sentence": (1.2, plain_text.begun_sentence),
    "few shot": (2, plain_text.few_shot),
    "bare question": (1.2, plain_text.bare_question),
    "plain question": (0.6, _plain_question),
    "pattern": (1, plain_text.pattern),
    "facts in a row": (0.8, plain_text.facts_in_a_row),
    "JSON text": (0.5, plain_text.json_text),
    "character text": (0.15, plain_text.character_text),
    "foreign": (0.8, plain_text.foreign),
}


def samples(seed: int) -> Iterator[Sample]:
    """An endless stream of training samples, the same for the same seed."""
    rng = Random(seed)
    names = list(SAMPLES)
    weights = [weight for weight, _ in SAMPLES.values()]
    while True:
        yield SAMPLES[rng.choices(names, weights)[0]][1](rng)
