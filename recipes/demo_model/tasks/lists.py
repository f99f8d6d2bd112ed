"""Numbered lists of a given length, further lists without repeats, countries with capitals."""

from collections.abc import Callable
from random import Random

from recipes.demo_model.conversation import Chat, Message
from recipes.demo_model.countries import COUNTRIES, KNOWN, Country
from recipes.demo_model.phrasing import system_prompt, vary
from recipes.demo_model.words import LISTS, NUMBER_WORDS

_PAIR_REQUESTS = [
    "List {n} countries and their capitals.",
    "List {n} countries and their capitals.",
    "List {n} countries with their capitals.",
    "Please give me a list of {n} countries and their capitals.",
    "Give me {n} countries and their capitals.",
    "Name {n} countries and their capitals.",
    "Can you list {n} countries and their capitals?",
    "Write a list of {n} countries and their capital cities.",
    "Tell me {n} countries and their capitals.",
    "I need a list of {n} countries and their capitals.",
]
_REQUESTS = [
    "List {n} {things}.",
    "Name {n} {things}.",
    "Give me {n} {things}.",
    "Give me a list of {n} {things}.",
    "Please give me a list of {n} {things}.",
    "Can you name {n} {things}?",
    "Tell me {n} {things}.",
    "Write down {n} {things}.",
    "What are {n} {things}?",
    "{n} {things}",
]
_BEGINNINGS = [
    "", "", "please ", "can you ", "could you ", "I want you to ", "I would like you to ", "now ",
    "would you ", "your task: ", "quickly ",
]  # fmt: skip
_ASKS = [
    "list", "name", "give me", "write", "tell me", "show me", "write down", "enumerate", "suggest",
    "think of", "provide", "make a list of", "come up with",
]  # fmt: skip
_MODIFIERS = ["", "", "", "just ", "only ", "any ", "the names of ", "some: "]
_ENDINGS = ["", "", " please", " for me", " in a numbered list", " as a list", ", nothing else"]


def _request(rng: Random, written: list[str]) -> str:
    """A request for a list: a fixed one, or one composed of parts."""
    if rng.random() < 0.5:
        return rng.choice(written)
    begin, ask = rng.choice(_BEGINNINGS), rng.choice(_ASKS)
    text = begin + ask + " " + rng.choice(_MODIFIERS) + "{n} {things}" + rng.choice(_ENDINGS)
    mark = "?" if begin in ("can you ", "could you ", "would you ") else "."
    return text[0].upper() + text[1:] + mark


_ANOTHER = [
    "Please give me another list of {n} {things}.",
    "Give me another list of {n} {things}.",
    "Another list of {n} {things}, please.",
    "Give me {n} more {things}.",
    "{n} more, please.",
    "Another {n}.",
    "Please give me another list.",
    "Another list please.",
    "Give me another list.",
    "And {n} different ones?",
    "Now {n} other {things}.",
    "Can you give me another list of {n} {things}?",
    "Can I have {n} more?",
    "Different ones, please.",
    "A different list, please.",
    "More.",
    "I would like {n} more {things}.",
    "Please list {n} other {things}.",
]


def singular(noun: str) -> str:
    """The singular of a list's name, for "1 animal"."""
    irregular = {
        "cities": "city", "countries": "country", "bodies": "body", "vehicles": "vehicle",
        "fish": "fish", "clothes": "piece of clothing", "pieces of furniture": "piece of furniture",
        "countries and their capitals": "country and its capital",
    }  # fmt: skip
    return irregular.get(noun, noun.removesuffix("s"))


def _take(rng: Random, items: list[str], used: set[str], count: int) -> list[str]:
    """`count` unused items: mostly the best known ones in order, sometimes any."""
    free = [item for item in items if item not in used]
    if rng.random() < 0.8:
        return free[:count]
    return rng.sample(free, min(count, len(free)))


def _conversation(
    rng: Random,
    things: str,
    items: list[str],
    requests: list[str],
    show: Callable[[str], str] = str,
) -> Chat:
    """One to three lists requested in a row; none repeats an entry of an earlier one."""
    messages: list[Message] = []
    if rng.random() < 0.35:
        messages.append({"role": "system", "content": system_prompt(rng)})
    used: set[str] = set()
    limit = min(10, len(items))
    count = rng.choice([3, 3, 3, rng.randint(1, 5), rng.randint(1, limit)])
    turns = rng.choice([1, 1, 2, 2, 3])
    for turn in range(turns):
        if turn and rng.random() < 0.3:
            count = rng.randint(1, 6)
        if len(used) + count > len(items):
            break
        noun = things if count > 1 else singular(things)
        number = NUMBER_WORDS[count] if rng.random() < 0.25 else str(count)
        template = _request(rng, requests) if turn == 0 else rng.choice(_ANOTHER)
        if "{n}" not in template:
            # A request without a number means as many as before.
            count = len(messages[-1]["content"].splitlines())
            if len(used) + count > len(items):
                break
        chosen = _take(rng, items, used, count)
        used.update(chosen)
        request = template.format(n=number, things=noun)
        messages.append({"role": "user", "content": vary(rng, request)})
        lines = [f"{index}. {show(item)}" for index, item in enumerate(chosen, 1)]
        messages.append({"role": "assistant", "content": "\n".join(lines)})
    answer = messages.pop()["content"]
    thought = None
    if rng.random() < 0.1:
        thought = f"The user wants {answer.count(chr(10)) + 1} {things}. I will number them."
    return Chat(messages, answer, thought=thought)


def countries_and_capitals(rng: Random) -> Chat:
    """Numbered pairs of country and capital."""
    order: tuple[Country, ...] = KNOWN if rng.random() < 0.8 else COUNTRIES
    capitals = {country.bare: country.capital for country in order}
    return _conversation(
        rng,
        "countries and their capitals",
        list(capitals),
        _PAIR_REQUESTS,
        lambda name: f"{name} - {capitals[name]}",
    )


def things(rng: Random) -> Chat:
    """A numbered list of things of one kind."""
    noun, items = rng.choice(list(LISTS.items()))
    return _conversation(rng, noun, items, _REQUESTS)


def by_continent(rng: Random) -> Chat:
    """Countries of one continent."""
    continent = rng.choice(["Europe", "Asia", "Africa", "South America", "North America"])
    items = [country.bare for country in COUNTRIES if country.continent == continent][:15]
    requests = ["List {n} {things}.", "Name {n} {things}.", "Give me {n} {things}."]
    return _conversation(rng, f"countries in {continent}", items, requests)
