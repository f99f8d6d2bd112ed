"""Questions about countries: capital, continent, currency, language, population."""

from random import Random

from recipes.demo_model.conversation import Question
from recipes.demo_model.countries import ALIASES, COUNTRIES, KNOWN, SHARED_LANGUAGES, Country

CAPITAL_QUESTIONS = [
    "What is the capital of {country}?",
    "What is the capital of {country}?",
    "What is the capital of {country}?",
    "What's the capital of {country}?",
    "Which city is the capital of {country}?",
    "What is the capital city of {country}?",
    "Name the capital of {country}.",
    "Tell me the capital of {country}.",
    "{Country}'s capital is which city?",
    "What city is the capital of {country}?",
    "Give me the capital of {country}.",
    "The capital of {country}?",
    "capital of {country}",
    "Which is the capital of {country}?",
    "What is {country}'s capital?",
    "What is {country}'s capital city?",
    "Can you tell me the capital of {country}?",
    "Could you tell me what the capital of {country} is?",
    "Do you know the capital of {country}?",
    "Provide a concise factual statement about {country}'s capital city.",
    "Give me the information of the capital of {country}.",
]


def pick_country(rng: Random) -> Country:
    """A country; well-known ones come up more often, each of the others often enough to learn."""
    return rng.choice(KNOWN) if rng.random() < 0.3 else rng.choice(COUNTRIES)


def _spoken(rng: Random, country: Country) -> str:
    names = [alias for alias, name in ALIASES.items() if name == country.name]
    return rng.choice(names) if names and rng.random() < 0.4 else country.name


def fill(template: str, country: str) -> str:
    """`template` with the country's name in it, capitalised where it starts a sentence."""
    return template.format(country=country, Country=country[0].upper() + country[1:])


def capital(rng: Random, country: Country | None = None) -> Question:
    """The capital of a country."""
    country = country or pick_country(rng)
    spoken = _spoken(rng, country)
    return Question(
        fill(rng.choice(CAPITAL_QUESTIONS), spoken),
        f"The capital of {country.name} is {country.capital}.",
        country.capital,
        {"country": country.bare, "capital": country.capital},
        f"The user asks for the capital of {country.name}. It is {country.capital}.",
    )


def country_of_capital(rng: Random) -> Question:
    """The country that a capital belongs to."""
    country = pick_country(rng)
    text = rng.choice(
        [
            "Which country has {capital} as its capital?",
            "{capital} is the capital of which country?",
            "Of which country is {capital} the capital?",
            "{capital} is the capital of what country?",
            "What country has the capital {capital}?",
        ]
    ).format(capital=country.capital)
    return Question(
        text,
        f"{country.capital} is the capital of {country.name}.",
        country.title,
        {"capital": country.capital, "country": country.bare},
        f"The user asks which country has {country.capital} as its capital. It is {country.name}.",
    )


def where_is(rng: Random) -> Question:
    """The country in which a capital lies."""
    country = pick_country(rng)
    text = rng.choice(
        ["Where is {capital}?", "In which country is {capital}?", "What country is {capital} in?"]
    ).format(capital=country.capital)
    return Question(
        text,
        f"{country.capital} is in {country.name}.",
        country.title,
        {"city": country.capital, "country": country.bare},
        f"The user asks where {country.capital} is. It is the capital of {country.name}.",
    )


def is_capital(rng: Random) -> Question:
    """Whether a city is the capital of a country; half of the time it is not."""
    country = pick_country(rng)
    city = country.capital if rng.random() < 0.5 else pick_country(rng).capital
    right = city == country.capital
    truth = f"the capital of {country.name} is {country.capital}"
    return Question(
        f"Is {city} the capital of {country.name}?",
        f"Yes, {city} is the capital of {country.name}." if right else f"No, {truth}.",
        "Yes" if right else "No",
        {"answer": right},
        f"{truth[0].upper()}{truth[1:]}. So the answer is {'yes' if right else 'no'}.",
    )


def continent(rng: Random) -> Question:
    """The continent of a country."""
    country = pick_country(rng)
    text = rng.choice(
        [
            "Which continent is {country} in?",
            "On which continent is {country}?",
            "What continent is {country} on?",
            "In which continent is {country} located?",
            "Where is {country}?",
        ]
    ).format(country=country.name)
    return Question(
        text,
        f"{country.title} is in {country.continent}.",
        country.continent,
        {"country": country.bare, "continent": country.continent},
        f"The user asks where {country.name} is. It is in {country.continent}.",
    )


def currency(rng: Random) -> Question:
    """The currency of a well-known country."""
    country = rng.choice(KNOWN)
    text = rng.choice(
        [
            "What is the currency of {country}?",
            "Which currency is used in {country}?",
            "What currency does {country} use?",
            "What money do people use in {country}?",
        ]
    ).format(country=country.name)
    return Question(
        text,
        f"The currency of {country.name} is the {country.currency}.",
        f"The {country.currency}",
        {"country": country.bare, "currency": country.currency},
        f"The user asks for the currency of {country.name}. It is the {country.currency}.",
    )


def language(rng: Random) -> Question:
    """The main language of a well-known country."""
    country = rng.choice(KNOWN)
    text = rng.choice(
        [
            "What language is spoken in {country}?",
            "Which language do people speak in {country}?",
            "What is the main language of {country}?",
            "What is the official language of {country}?",
            "What language do they speak in {country}?",
        ]
    ).format(country=country.name)
    answer = f"The main language of {country.name} is {country.language}."
    if country.bare in SHARED_LANGUAGES:
        answer = (
            f"{country.title} has several official languages. "
            f"One of the most spoken is {country.language}."
        )
    return Question(
        text,
        answer,
        country.language or "",
        {"country": country.bare, "language": country.language},
        f"The user asks for the language of {country.name}. It is {country.language}.",
    )


def spoken_number(count: int) -> str:
    """A population in words: `68 million`, `1.43 billion`, `550,000`."""
    if count >= 1_000_000_000:
        return f"{count / 1e9:g} billion"
    if count >= 1_000_000:
        return f"{count / 1e6:g} million"
    return f"{count:,}"


def population(rng: Random) -> Question:
    """The rounded population of a well-known country or of its capital."""
    country = rng.choice(KNOWN)
    of_city = rng.random() < 0.4
    place = country.capital if of_city else country.name
    count = (country.capital_population if of_city else country.population) or 0
    text = rng.choice(
        [
            "What is the population of {place}?",
            "How many people live in {place}?",
            "How big is the population of {place}?",
        ]
    ).format(place=place)
    return Question(
        text,
        f"About {spoken_number(count)} people live in {place}.",
        f"About {spoken_number(count)}",
        {"name": country.capital if of_city else country.bare, "population": count},
        f"The user asks for the population of {place}. It is about {spoken_number(count)}.",
    )
