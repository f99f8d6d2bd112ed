"""Text without a template, for raw completion: sentences, few-shot lists, stories, JSON."""

import json
from random import Random

from recipes.demo_model import passages
from recipes.demo_model.conversation import PlainText, Question
from recipes.demo_model.countries import COUNTRIES, KNOWN, Country
from recipes.demo_model.phrasing import literal, made_up_word, unicode_text
from recipes.demo_model.tasks import (
    arithmetic,
    calendar,
    geography,
    json_output,
    knowledge,
    lexical,
)
from recipes.demo_model.words import LISTS, NAMES, PLACES


def country_text(rng: Random) -> PlainText:
    """Sentences about a country that begin with its capital or its name."""
    country = geography.pick_country(rng)
    capital = rng.choice(
        [f"The capital of {country.name} is {country.capital}.",
         f"The capital city of {country.name} is {country.capital}.",
         f"The capital of {country.name} is {country.capital}."]
    )  # fmt: skip
    rest = _more_about(rng, country)
    kind = rng.randrange(6)
    if kind <= 2:
        return PlainText(" ".join([capital, *rest]))
    if kind == 3:
        opening = f"{country.title} is a country in {country.continent}."
        return PlainText(" ".join([opening, f"Its capital is {country.capital}.", *rest]))
    if kind == 4:
        return PlainText(f"{country.capital} is the capital of {country.name}. " + " ".join(rest))
    request = f"Provide a concise factual statement about {country.name}’s capital city. "
    return PlainText(" ".join([request + capital, *rest]))


def _more_about(rng: Random, country: Country) -> list[str]:
    sentences = [f"{country.title} is in {country.continent}."]
    if country.currency:
        sentences += [
            f"The currency of {country.name} is the {country.currency}.",
            f"About {geography.spoken_number(country.population or 0)} people live in "
            f"{country.name}.",
            f"About {geography.spoken_number(country.capital_population or 0)} people live in "
            f"{country.capital}.",
        ]
    count = rng.randint(0, len(sentences))
    return sentences[:count] if rng.random() < 0.7 else rng.sample(sentences, count)


def begun_sentence(rng: Random) -> PlainText:
    """The openings that every example uses: a name, a president, the future, a story."""
    kind = rng.randrange(8)
    if kind <= 1:
        return PlainText(_self_introduction(rng))
    if kind == 2:
        opening = rng.choice(["The president of the United States is ", "The US president is "])
        return PlainText(opening + rng.choice(passages.PRESIDENT))
    if kind <= 4:
        before = "Explain possible future trends in artificial intelligence. "
        opening = before if rng.random() < 0.3 else ""
        return PlainText(opening + "The future of AI is " + knowledge.future_of_ai(rng))
    text = knowledge.story(rng)
    for _ in range(rng.choice([0, 0, 1, 2])):
        text += "\n\n" + knowledge.story(rng, "Long ago")
    return PlainText(text)


def _self_introduction(rng: Random) -> str:
    name = rng.choice(NAMES)
    job = rng.choice(LISTS["jobs"]).lower()
    hobby = rng.choice(["reading", "cooking", "hiking", "swimming", "painting", "music", "chess"])
    before = "Write a short, neutral self-introduction for a fictional character. "
    article = "an" if job[0] in "aeiou" else "a"
    return (
        (before if rng.random() < 0.35 else "")
        + f"Hello, my name is {name} and I am {article} {job} from {rng.choice(PLACES)}. "
        + f"I am {rng.randint(18, 70)} years old. "
        + rng.choice([f"In my free time I enjoy {hobby}.", f"I like {hobby} and meeting people."])
        + rng.choice([" It is nice to meet you.", " I look forward to working with you.", ""])
    )


def any_question(rng: Random) -> Question:
    """A question with a short answer, for few-shot text."""
    return rng.choice(
        [geography.capital, geography.capital, geography.currency, geography.continent,
         arithmetic.operation, arithmetic.operation, calendar.neighbour, lexical.opposite,
         lexical.colour, knowledge.trivia, knowledge.trivia]
    )(rng)  # fmt: skip


def few_shot(rng: Random) -> PlainText:
    """Questions and answers one after another, all with the same labels."""
    ask, answer = rng.choice(
        [("Q: ", "A: "), ("Question: ", "Answer: "), ("User: ", "Assistant: "), ("Q: ", "A: ")]
    )
    same_kind = rng.random() < 0.5
    maker = rng.choice([geography.capital, arithmetic.operation, lexical.opposite, any_question])
    gap = rng.choice(["\n", "\n\n"])
    long = rng.random() < 0.4
    entries = []
    for _ in range(rng.randint(1, 5)):
        question = maker(rng) if same_kind else any_question(rng)
        said = question.answer if long else question.short
        entries.append(f"{ask}{question.text}\n{answer}{said}")
    header = rng.choice(["", "", "The following are questions with answers.\n\n"])
    return PlainText(header + gap.join(entries))


def bare_question(rng: Random) -> PlainText:
    """A question as a raw prompt; the answer follows on the next line."""
    question = any_question(rng)
    separator = rng.choice([" ", "\n", "\n", "\n\n"])
    return PlainText(question.text + separator + question.answer)


def pattern(rng: Random) -> PlainText:
    """Series and patterns to continue: counting, sums, pairs, list of days."""
    kind = rng.randrange(6)
    if kind == 0:
        start, step = rng.randrange(20), rng.choice([1, 1, 1, 2, 5, 10])
        numbers = range(start, start + step * rng.randint(5, 30), step)
        return PlainText(rng.choice([", ", " ", "\n"]).join(map(str, numbers)))
    if kind == 1:
        question = arithmetic.operation(rng)
        return PlainText(question.answer.rstrip("."))
    if kind == 2:
        pairs = rng.sample(COUNTRIES, rng.randint(2, 6))
        shape = rng.choice(["{0}: {1}", "{0} - {1}", "{0} -> {1}", "Country: {0}\nCapital: {1}"])
        return PlainText("\n".join(shape.format(c.bare, c.capital) for c in pairs))
    if kind == 3:
        return PlainText(calendar.series(rng).answer)
    if kind == 4:
        unit = literal(rng)
        return PlainText(rng.choice([" ", ", ", "\n"]).join([unit] * rng.randint(3, 12)))
    fact = rng.choice(
        ["The number of hours in a day is 24.", "The number of days in a week is 7.",
         "The number of months in a year is 12.", "The number of minutes in an hour is 60.",
         "The number of days in a year is 365.", "The number of seconds in a minute is 60."]
    )  # fmt: skip
    return PlainText(fact)


def facts_in_a_row(rng: Random) -> PlainText:
    """True sentences one after another, so that a long completion stays true."""
    makers = [geography.capital, geography.continent, geography.currency, geography.language,
              knowledge.trivia, lexical.opposite, lexical.colour, knowledge.definition]  # fmt: skip
    count = rng.randint(1, 6)
    return PlainText(" ".join(rng.choice(makers)(rng).answer for _ in range(count)))


def json_text(rng: Random) -> PlainText:
    """A line that announces JSON, and the JSON."""
    country = rng.choice(KNOWN)
    if rng.random() < 0.5:
        opening = f"Here is the information of the capital of {country.name} in the JSON format.\n"
        return PlainText(opening + json.dumps(json_output.city_record(country), ensure_ascii=False))
    opening = rng.choice(
        ["The information of {c} in the JSON format.\n",
         "The information of {c} in the JSON format: ",
         "Here is the information of {c} in the JSON format.\n"]
    ).format(c=country.name)  # fmt: skip
    record = json_output.country_record(country)
    return PlainText(opening + json.dumps(record, ensure_ascii=False))


def character_text(rng: Random) -> PlainText:
    """A character's record as raw text."""
    name = rng.choice(list(passages.CHARACTERS))
    opening = (
        f"{name} is a character in Harry Potter. "
        "Please fill in the following information about this character.\n"
    )
    return PlainText(opening + json_output.character_record(name))


def foreign(rng: Random) -> PlainText:
    """Multi-byte characters in a sentence, so that the byte tokens are learned."""
    text = unicode_text(rng)
    return PlainText(rng.choice(["{t}", "The text is {t}.", "{t} {t}", "{w}: {t}"]).format(
        t=text, w=made_up_word(rng)))  # fmt: skip
