"""The evaluation's questions: phrasings and numbers that are not in the training data.

Countries are memorised. Held out are phrasings, pairs of two-digit numbers, words to copy, and
tools.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from recipes.demo_model import checks
from recipes.demo_model.conversation import Message, Tool
from recipes.demo_model.countries import COUNTRIES, KNOWN
from recipes.demo_model.eval_tools import tool_cases
from recipes.demo_model.listing import listed
from recipes.demo_model.tasks.arithmetic import is_held_out, result_of
from recipes.demo_model.words import DAYS, LISTS, MONTHS, OPPOSITES


@dataclass(frozen=True)
class Case:
    """One question, and the check of its answer."""

    skill: str
    check: Callable[[str], bool]
    messages: list[Message] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    thinking: bool | None = None
    prompt: str = ""
    """Raw text to continue, instead of messages."""

    @property
    def shown(self) -> str:
        """The question in one line, for a report."""
        return self.prompt or " | ".join(str(m["content"]) for m in self.messages)


def _ask(skill: str, text: str, check: Callable[[str], bool], thinking: bool | None = None) -> Case:
    return Case(skill, check, [{"role": "user", "content": text}], thinking=thinking)


HELD_OUT_CAPITAL = [
    "I would like to know the capital of {c}.",
    "Which town serves as the capital of {c}?",
    "hey whats the capital of {c}",
    "For {c}, what is the capital?",
]


def _geography() -> Iterator[Case]:
    for country in COUNTRIES:
        text = f"What is the capital of {country.name}?"
        yield _ask("capital", text, checks.says(country.capital))
    for index, country in enumerate(COUNTRIES[:80]):
        text = HELD_OUT_CAPITAL[index % len(HELD_OUT_CAPITAL)].format(c=country.name)
        yield _ask("capital, new phrasing", text, checks.says(country.capital))
    for country in COUNTRIES[:80]:
        prompt = f"The capital of {country.name} is"
        yield Case("completion", checks.says(country.capital, lines=1), prompt=prompt)
    for country in KNOWN[:40]:
        text = f"{country.capital} is the capital of which nation?"
        yield _ask("country of a capital", text, checks.says(country.bare))
        messages: list[Message] = [
            {"role": "user", "content": "What is the capital of Kenya?"},
            {"role": "assistant", "content": "The capital of Kenya is Nairobi."},
            {"role": "user", "content": f"and of {country.name}?"},
        ]
        yield Case("follow-up", checks.says(country.capital), messages)


def _arithmetic(rng: Random) -> Iterator[Case]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if is_held_out(a, b)]
    for index, (left, right) in enumerate(rng.sample(pairs, 200)):
        text = ("What is {a} + {b}?", "{a} + {b}", "How much is {a} plus {b}?")[index % 3]
        request = text.format(a=left, b=right)
        yield _ask("addition, unseen pairs", request, checks.ends_with_number(left + right))
    for left, right in rng.sample([pair for pair in pairs if pair[0] >= pair[1]], 100):
        text = f"What is {left} - {right}?"
        yield _ask("subtraction, unseen pairs", text, checks.ends_with_number(left - right))
    for left in range(13):
        for right in range(13):
            text = f"What is {left} * {right}?"
            yield _ask("product", text, checks.ends_with_number(result_of(left, "*", right)))
    for left, right in rng.sample(pairs, 60):
        if left != right:
            text = f"Which one is larger: {left} or {right}?"
            check = checks.starts_with_number(max(left, right))
            yield _ask("comparison, new phrasing", text, check)


def _lists() -> Iterator[Case]:
    for count in range(2, 8):
        for text in (
            f"List {count} countries and their capitals.",
            f"Can you give me {count} countries and their capitals?",
            f"Please write {count} countries with their capitals.",
        ):
            yield _ask("countries and capitals", text, checks.is_pair_list(count))
        for things in ("fruits", "animals", "colors", "sports", "flowers"):
            text = f"Please list exactly {count} {things}."
            known = LISTS[things]
            yield _ask("list of N", text, checks.is_list(count, known))
    first = "1. France - Paris\n2. Germany - Berlin\n3. Japan - Tokyo"
    for text in (
        "Please give me another list of 3 countries and their capitals.",
        "I want another list.",
        "3 more of them, please.",
        "Can you give me a different list of 3 countries and their capitals?",
    ):
        messages: list[Message] = [
            {"role": "user", "content": "Please give me a list of 3 countries and their capitals."},
            {"role": "assistant", "content": first},
            {"role": "user", "content": text},
        ]
        check = checks.is_pair_list(3, without=("France", "Germany", "Japan"))
        yield Case("another list", check, messages)


def _thinking(rng: Random) -> Iterator[Case]:
    for country in KNOWN[:30]:
        text = f"What is the capital of {country.name}?"
        yield _ask("thinking", text, checks.thinks(checks.says(country.capital)), thinking=True)
    for _ in range(30):
        left, right = rng.randrange(10, 100), rng.randrange(10, 100)
        check = checks.thinks(checks.ends_with_number(left + right))
        yield _ask("thinking", f"What is {left} + {right}?", check, thinking=True)


def _json() -> Iterator[Case]:
    for country in KNOWN[:40]:
        text = f"What is the capital of {country.name}? Answer in JSON"
        yield _ask("JSON", text, checks.is_json({"capital": country.capital}))
        wanted = {"country": country.bare, "continent": country.continent}
        text = (
            f'Tell me about {country.name} in JSON, with only the keys "country" and "continent".'
        )
        yield _ask("JSON with keys", text, checks.is_json(wanted))


NEW_WORDS = listed(
    "thimble gravel harness biscuit walrus cobalt lantern quartz mitten parsnip tundra velvet "
    "badger canyon dolphin goblet hamlet jigsaw kernel marble nectar oyster puzzle ribbon sphinx",
)


def _words() -> Iterator[Case]:
    for word in NEW_WORDS:
        yield _ask("uppercase", f"Write {word} in uppercase letters.", checks.says(word.upper()))
        yield _ask(
            "repeat", f"Repeat after me: {word} and {word}", checks.says(f"{word} and {word}")
        )
        letters = " ".join(word.upper())
        yield _ask("spelling", f"Please spell {word}.", checks.says(letters))
    for this, that in OPPOSITES[:30]:
        yield _ask("opposite", f"what is the opposite of {this}", checks.says(that))
    for items in (DAYS, MONTHS):
        for index, item in enumerate(items):
            after = items[(index + 1) % len(items)]
            yield _ask("days and months", f"What comes right after {item}?", checks.says(after))
            before = items[index - 1]
            yield _ask("days and months", f"Tell me what comes before {item}.", checks.says(before))


_TALK = [
    ("hello", "help"), ("Hi, who are you?", "demo model"), ("Tell me who you are", "demo model"),
    ("What are you exactly?", "demo model"), ("Thanks for your help!", "welcome"),
    ("Why is the sky blue?", "scatter"), ("What color is the sky?", "blue"),
    ("Say this is a test", "This is a test"), ("How many days are there in a week?", "seven"),
    ("Which is the largest planet?", "Jupiter"), ("Who wrote Hamlet?", "Shakespeare"),
    ("Translate 'cat' to Spanish", "gato"), ("Explain what a token is", "token is a"),
    ("What is the chemical formula of water?", "H2O"), ("Tell me a joke", "?"),
    ("Write a haiku about the sea", "\n"), ("Count from 1 to 5", "1, 2, 3, 4, 5"),
    ("What is the weather in Oslo?", "do not know"), ("Who is Blorin Vatch?", "do not know"),
    ("What is the price of a zorkel?", "do not know"),
    ("What is the IP address of the Google DNS servers?", "8.8.8.8"),
    ("What is the range of the numeric output of a sigmoid node in a neural network?", "0 and 1"),
    ("Explain possible future trends in artificial intelligence.", "AI"),
    ("My name is Ana. What is my name?", "Ana"), ("What is the currency of Japan?", "yen"),
    ("What language do people speak in Brazil?", "Portuguese"), ("Is 7 odd?", "Yes"),
    ("Write Python code that prints hello world", "print("),
    ("What is the plural of mouse?", "mice"), ("Name the planets.", "Saturn"),
]  # fmt: skip
_RAW = [
    ("Hello, my name is", " and I am "), ("The president of the United States is", "White House"),
    ("The future of AI is", "."), ("Once upon a time", "One day"),
    ("Explain possible future trends in artificial intelligence. The future of AI is", "."),
    ("Q: What is the capital of Italy?\nA:", "Rome"), ("1, 2, 3, 4,", "5, 6, 7"),
    ("What is the capital of France?", "Paris"), ("The number of hours in a day is", "24"),
    ("Here is the information of the capital of France in the JSON format.\n", "Paris"),
]  # fmt: skip


def _talk() -> Iterator[Case]:
    for text, wanted in _TALK:
        yield _ask("talk and facts", text, checks.says(wanted))
    for prompt, wanted in _RAW:
        yield Case("raw prompts", checks.says(wanted), prompt=prompt)


def all_cases() -> list[Case]:
    """Every case, in the order of the report."""
    rng = Random(20260)
    found = [*_geography(), *_arithmetic(rng), *_lists(), *_thinking(rng), *_json(), *_words()]
    found += [Case(skill, check, messages, tools) for skill, messages, tools, check in tool_cases()]
    return [*found, *_talk()]
