"""Answers in JSON: requested in words, by keys, by schema, or forced by a grammar."""

import json
from random import Random
from typing import Any

from recipes.demo_model import passages
from recipes.demo_model.conversation import Chat, Message
from recipes.demo_model.countries import KNOWN, Country
from recipes.demo_model.listing import listed
from recipes.demo_model.phrasing import spoken, system_prompt
from recipes.demo_model.tasks import geography
from recipes.demo_model.words import NAMES

_ASK = [
    "{q} Answer in JSON.",
    "{q} Answer in JSON format.",
    "{q} Reply in JSON.",
    "{q} Respond with JSON only.",
    "{q} Return JSON.",
    "{q} Give the answer as JSON.",
    "{q} Please answer in JSON.",
    "{q} Output JSON.",
    "{q} Use JSON.",
    "Answer in JSON: {q}",
    "Answer in JSON. {q}",
    "In JSON: {q}",
]
_KEYED = [
    "{q} Answer in JSON with the keys {k}.",
    "{q} Return a JSON object with {k}.",
    "{q} Answer in JSON with keys {k}.",
    "{q} Reply with a JSON object containing {k}.",
    "{q} Use JSON with the fields {k}.",
]


def values_of(country: Country) -> dict[str, Any]:
    """Every field of a country, under the names that a schema may use."""
    return {
        "country": country.bare,
        "country_name": country.bare,
        "capital": country.capital,
        "capital_city": country.capital,
        "city": country.capital,
        "continent": country.continent,
        "currency": country.currency,
        "language": country.language,
        "population": country.population,
    }


def dump(rng: Random, data: dict[str, Any]) -> str:
    """JSON on one line, sometimes on several."""
    return json.dumps(data, ensure_ascii=False, indent=2 if rng.random() < 0.15 else None)


def _chat(rng: Random, request: str, system: str | None = None) -> list[Message]:
    messages: list[Message] = []
    if system or rng.random() < 0.25:
        messages.append({"role": "system", "content": system or system_prompt(rng)})
    messages.append({"role": "user", "content": request})
    return messages


def capital_in_json(rng: Random) -> Chat:
    """A capital question that requests JSON."""
    question = geography.capital(rng)
    data = question.data
    if rng.random() < 0.2:
        system = rng.choice(["Answer in JSON.", "You answer in JSON.", "Reply only with JSON.",
                             "You are a helpful assistant that answers in JSON."])  # fmt: skip
        return Chat(_chat(rng, spoken(rng, question), system), json.dumps(data, ensure_ascii=False))
    request = rng.choice(_ASK).format(q=question.text)
    thought = question.thought + " I answer in JSON." if rng.random() < 0.1 else None
    return Chat(_chat(rng, request), json.dumps(data, ensure_ascii=False), thought=thought)


def chosen_keys(rng: Random) -> Chat:
    """The user names the keys, or shows the shape."""
    country = rng.choice(KNOWN)
    known = values_of(country)
    keys = rng.sample(list(known), rng.randint(1, 4))
    data = {key: known[key] for key in keys}
    asked = rng.choice(
        [f"Tell me about {country.name}.", f"What do you know about {country.name}?",
         f"Describe {country.name}.", f"Give me information about {country.name}.",
         f"What is the capital of {country.name}?"]
    )  # fmt: skip
    if rng.random() < 0.7:
        quoted = [f'"{key}"' if rng.random() < 0.5 else key for key in keys]
        named = quoted[0] if len(keys) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1]
        request = rng.choice(_KEYED).format(q=asked, k=named)
    else:
        shape = json.dumps(dict.fromkeys(keys, "..."))
        request = f"{asked} Use this format: {shape}"
    return Chat(_chat(rng, request), dump(rng, data))


_CITY_REQUESTS = [
    "Give me the information of the capital of {c} in the JSON format.",
    "Please generate the information of the capital of {c} in the JSON format.",
    "Here is the information of the capital of {c} in the JSON format.",
    "Return the name and population of the capital of {c} as JSON.",
    "Introduce the capital of {c}. Return in a JSON format.",
]
_COUNTRY_REQUESTS = [
    "The information of {c} in the JSON format.",
    "Give me the information of {c} in the JSON format.",
    "Here is the information of {c} in the JSON format.",
    "Describe {c} as a JSON object.",
    "Return JSON about {c}.",
]


def city_record(country: Country) -> dict[str, Any]:
    """The capital of a country with its population."""
    return {"name": country.capital, "population": country.capital_population}


def country_record(country: Country) -> dict[str, Any]:
    """A country with its capital and its population."""
    return {"name": country.bare, "capital": country.capital, "population": country.population}


def information(rng: Random) -> Chat:
    """A record of a country or of its capital."""
    country = rng.choice(KNOWN)
    if rng.random() < 0.5:
        request = rng.choice(_CITY_REQUESTS).format(c=country.name)
        return Chat(_chat(rng, request), json.dumps(city_record(country), ensure_ascii=False))
    request = rng.choice(_COUNTRY_REQUESTS).format(c=country.name)
    return Chat(_chat(rng, request), json.dumps(country_record(country), ensure_ascii=False))


def forced_by_grammar(rng: Random) -> Chat:
    """A grammar writes the keys and the punctuation; the model fills in the values."""
    country = rng.choice(KNOWN)
    about_city = rng.random() < 0.3
    known = values_of(country)
    known["name"] = country.bare
    request = geography.capital(rng, country).text
    if about_city:
        request = rng.choice(_CITY_REQUESTS).format(c=country.name)
        known |= city_record(country)
    elif rng.random() < 0.5:
        request = rng.choice(_COUNTRY_REQUESTS).format(c=country.name)
    else:
        known["answer"] = country.capital
    keys = rng.sample(list(known), rng.randint(1, 4))
    line = rng.choice(["", "", "\n  "])
    pieces: list[tuple[str, bool]] = []
    for index, key in enumerate(keys):
        opening = "{" + line if index == 0 else "," + (line or " ")
        pieces.append((f'{opening}"{key}": ', False))
        pieces.append((json.dumps(known[key], ensure_ascii=False), True))
    pieces.append(("\n}" if line else "}", True))
    return Chat(_chat(rng, request), "".join(text for text, _ in pieces), pieces=pieces)


_JOBS = listed("teacher doctor engineer chef pilot artist farmer nurse")


def person(rng: Random) -> Chat:
    """An invented record of a person, with the requested keys."""
    name, age = rng.choice(NAMES), rng.randint(18, 70)
    job = rng.choice(_JOBS)
    known = {"name": name, "age": age, "job": job, "occupation": job, "city": "Paris"}
    keys = ["name", *rng.sample(["age", "job", "city", "occupation"], rng.randint(1, 2))]
    named = ", ".join(keys[:-1]) + " and " + keys[-1]
    request = rng.choice(
        ["Generate a JSON object for a person with {k}.", "Create a person in JSON with {k}.",
         "Give me a JSON object describing a person with {k}."]
    ).format(k=named)  # fmt: skip
    data = {key: known[key] for key in keys}
    return Chat(_chat(rng, request), dump(rng, data))


def character(rng: Random) -> Chat:
    """A character of a well-known series in a fixed record."""
    name = rng.choice(list(passages.CHARACTERS))
    if rng.random() < 0.4:
        name = "Harry Potter"
    request = (
        f"{name} is a character in Harry Potter. "
        "Please fill in the following information about this character."
    )
    return Chat(_chat(rng, request), character_record(name))


def character_record(name: str) -> str:
    """The record of a character, laid out with four spaces."""
    house, blood, job, wood, core, length, alive, patronus, fear = passages.CHARACTERS[name]
    return (
        f'{{\n    "name": "{name}",\n    "house": "{house}",\n    "blood status": "{blood}",\n'
        f'    "occupation": "{job}",\n    "wand": {{\n        "wood": "{wood}",\n'
        f'        "core": "{core}",\n        "length": {length}\n    }},\n'
        f'    "alive": "{alive}",\n    "patronus": "{patronus}",\n    "bogart": "{fear}"\n}}'
    )
