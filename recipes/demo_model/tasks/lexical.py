"""Tasks on words: opposites, colours, plurals, copying, upper case, spelling, translation."""

import json
from collections.abc import Callable
from random import Random

from recipes.demo_model import words
from recipes.demo_model.conversation import Question
from recipes.demo_model.lexicon import any_word
from recipes.demo_model.listing import listed
from recipes.demo_model.phrasing import literal, made_up_word

# A word that is in two pairs keeps the first; each pair holds in both directions.
_OPPOSITE_OF: dict[str, str] = {}
for _pair in words.OPPOSITES:
    _OPPOSITE_OF.setdefault(_pair[0], _pair[1])
for _pair in words.OPPOSITES:
    _OPPOSITE_OF.setdefault(_pair[1], _pair[0])


def opposite(rng: Random) -> Question:
    """The opposite of a word."""
    this, that = rng.choice(list(_OPPOSITE_OF.items()))
    text = rng.choice(
        [
            "What is the opposite of {w}?",
            "What's the opposite of {w}?",
            "Give me the opposite of {w}.",
            "Name the opposite of '{w}'.",
            "What is an antonym of {w}?",
        ]
    ).format(w=this)
    return Question(
        text,
        f"The opposite of {this} is {that}.",
        that.capitalize(),
        {"word": this, "opposite": that},
        f"The user asks for the opposite of {this}. It is {that}.",
    )


def colour(rng: Random) -> Question:
    """The colour of a thing."""
    thing, shade = rng.choice(list(words.COLOURS_OF.items()))
    word = rng.choice(["color", "color", "colour"])
    text = rng.choice(["What {c} is {t}?", "What is the {c} of {t}?", "Which {c} is {t}?"])
    return Question(
        text.format(c=word, t=thing),
        f"{thing[0].upper()}{thing[1:]} is {shade}.",
        shade.capitalize(),
        {"color": shade},
        f"The user asks for the color of {thing}. It is {shade}.",
    )


def inflection(rng: Random) -> Question:
    """Plural, past tense, rhyme, young animal, animal sound."""
    kind = rng.randrange(5)
    table = (words.PLURALS, words.PASTS, words.RHYMES, words.YOUNG, words.SOUNDS)[kind]
    this, that = rng.choice(table)
    text, answer = (
        (f"What is the plural of {this}?", f"The plural of {this} is {that}."),
        (f"What is the past tense of {this}?", f"The past tense of {this} is {that}."),
        (f"What rhymes with {this}?", f"{that.capitalize()} rhymes with {this}."),
        (f"What is a baby {this} called?", f"A baby {this} is called a {that}."),
        (f"What sound does a {this} make?", f"A {this} says {that}."),
    )[kind]
    return Question(text, answer, that.capitalize(), {"answer": that}, answer)


def translation(rng: Random) -> Question:
    """A common word in another language."""
    english = rng.choice(list(words.TRANSLATIONS))
    tongue, foreign = rng.choice(list(words.TRANSLATIONS[english].items()))
    text = rng.choice(
        [
            "How do you say '{e}' in {t}?",
            "Translate '{e}' to {t}.",
            "Translate {e} into {t}.",
            "What is {e} in {t}?",
            "Say {e} in {t}.",
            "How do you say {e} in {t}?",
        ]
    ).format(e=english, t=tongue)
    return Question(
        text,
        f"'{english}' in {tongue} is '{foreign}'.",
        foreign,
        {"english": english, tongue.lower(): foreign},
        f"The user asks for {english} in {tongue}. It is {foreign}.",
    )


def copy(rng: Random) -> Question:
    """Repeat a given text exactly."""
    text = literal(rng)
    if rng.random() < 0.3:
        text += rng.choice([" ", " ", " and ", ", "]) + (
            literal(rng) if rng.random() < 0.7 else text
        )
    request = rng.choice(
        [
            "Repeat after me: {t}",
            "Repeat: {t}",
            "Say {t}",
            'Say "{t}"',
            "Echo {t}",
            "Copy this text: {t}",
            "Repeat the following: {t}",
            'Repeat this exactly: "{t}"',
            "Write {t}",
            "Please repeat: {t}",
            "Print {t}",
            "Reply with exactly: {t}",
            'Say this word: "{t}"',
        ]
    ).format(t=text)
    return Question(
        request, text, text, {"text": text}, "The user wants the same text back.", exact=True
    )


def this_is_a_test(rng: Random) -> Question:
    """The phrase that half of all client examples send."""
    text = rng.choice(["Say this is a test", "Say this is a test!", "Say 'this is a test'."])
    return Question(text, "This is a test.", "This is a test.", {"text": "This is a test."},
                    "The user wants me to say: this is a test.")  # fmt: skip


def _word(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.1:
        return rng.choice(words.OBJECTS)
    return rng.choice(words.NAMES) if roll < 0.15 else any_word(rng)


def change_case(rng: Random) -> Question:
    """A word or two in upper or lower case."""
    text = " ".join(_word(rng) for _ in range(rng.choice([1, 1, 1, 2])))
    upper = rng.random() < 0.7
    given = text if upper else text.upper()
    changed = text.upper() if upper else text.lower()
    name = "uppercase" if upper else "lowercase"
    request = rng.choice(
        ["Write '{t}' in {n}.", "Convert {t} to {n}.", "Make this {n}: {t}", "{t} in {n}",
         "Put the word {t} in {n}.",
            "Write the word {t} in {n}.",
            "Please write {t} in {n}.",
            "Turn {t} into {n}.",
            "{n}: {t}", "What is {t} in {n}?", "Change '{t}' to {n}."]
    ).format(t=given, n=name)  # fmt: skip
    return Question(
        request,
        changed,
        changed,
        {"text": changed},
        f"The user wants {given} in {name}.",
        exact=True,
    )


def spelling(rng: Random) -> Question:
    """Spell a word, or say its first letter, last letter or length."""
    word = _word(rng).lower()
    spelled = " ".join(word.upper())
    thought = f"Spell it: {spelled}."
    kind = rng.randrange(5)
    if kind <= 1:
        request = rng.choice(
            [
                "Spell {w}.",
                "How do you spell {w}?",
                "Spell the word '{w}'.",
                "Can you spell {w}?",
                "Please spell the word {w}.",
                "Spell out {w}.",
                "spell {w}",
                "Tell me how to spell {w}.",
            ]
        )
        return Question(request.format(w=word), spelled, spelled, {"letters": list(word)}, thought)
    if kind == 2:
        number = len(word)
        return Question(
            rng.choice(["How many letters are in the word {w}?", "How many letters does {w} have?"])
            .format(w=word),
            f"The word {word} has {number} letters.",
            str(number),
            {"word": word, "letters": number},
            thought + f" That is {number} letters.",
        )  # fmt: skip
    name, letter = ("first", word[0]) if kind == 3 else ("last", word[-1])
    return Question(
        f"What is the {name} letter of {word}?",
        f"The {name} letter of {word} is {letter.upper()}.",
        letter.upper(),
        {"word": word, "letter": letter.upper()},
        thought,
    )


_GOOD = listed(
    "great wonderful excellent amazing lovely fantastic delicious friendly perfect",
)
_BAD = listed(
    "terrible awful horrible bad boring disgusting rude broken disappointing",
)
_SUBJECTS = listed(
    "movie food hotel book service product restaurant phone weather game concert",
)


def sentiment(rng: Random) -> Question:
    """Whether a short review is positive or negative."""
    good = rng.random() < 0.5
    subject, adjective = rng.choice(_SUBJECTS), rng.choice(_GOOD if good else _BAD)
    review = rng.choice(
        ["The {s} was {a}.", "This {s} is {a}!", "I think the {s} was {a}.", "What a {a} {s}!"]
    ).format(s=subject, a=adjective)
    if rng.random() < 0.3:
        review += " I loved it." if good else " I hated it."
    label = "positive" if good else "negative"
    text = rng.choice(
        [
            "Is this review positive or negative? {r}",
            "Classify the sentiment: {r}",
            "What is the sentiment of this text: {r}",
            "Positive or negative: {r}",
        ]
    ).format(r=review)
    return Question(
        text,
        f"The sentiment is {label}.",
        label.capitalize(),
        {"sentiment": label},
        f"The word {adjective} is {label}.",
    )


_TEMPLATES = [
    ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
    ("My name is {name} and I am {age} years old.", ("name", "age")),
    ("{name} from {city} ordered {count} {thing}s.", ("name", "city", "count", "thing")),
    ("I am {name}, I live in {city}.", ("name", "city")),
    ("{name} bought {count} {thing}s.", ("name", "count", "thing")),
]


def extraction(rng: Random) -> Question:
    """Fields of a sentence, as JSON."""
    template, fields = rng.choice(_TEMPLATES)
    name = rng.choice(words.NAMES)
    if rng.random() < 0.4:
        name = made_up_word(rng).capitalize()
    values: dict[str, object] = {
        "name": name,
        "age": rng.randint(5, 90),
        "city": rng.choice(words.PLACES),
        "count": rng.randint(2, 30),
        "thing": rng.choice(words.OBJECTS),
    }
    sentence = template.format(**values)
    asked = [field for field in fields if rng.random() < 0.8] or [fields[0]]
    data = {field: values[field] for field in asked}
    listed = " and ".join(asked) if len(asked) < 3 else ", ".join(asked)
    text = rng.choice(
        [
            "Extract the {f} as JSON: {s}",
            "Extract the {f} from this text in JSON: {s}",
            "{s}\nReturn a JSON object with {f}.",
            'From the sentence "{s}" extract {f}. Answer in JSON.',
        ]
    ).format(f=listed, s=sentence)
    answer = json.dumps(data, ensure_ascii=False)
    return Question(text, answer, answer, data, f"The text gives the {listed}.", exact=True)


def number_word(rng: Random) -> Question:
    """A number as a word, or a word as a number."""
    number = rng.randrange(21)
    word = words.NUMBER_WORDS[number]
    if rng.random() < 0.5:
        return Question(
            f"Write {number} in words.", word, word, {"word": word}, f"{number} is {word}."
        )
    return Question(
        f"Write {word} as a number.", str(number), str(number), {"number": number},
        f"{word} is {number}.",
    )  # fmt: skip


def from_context(rng: Random) -> Question:
    """Answer from a statement that the user makes."""
    name, thing = rng.choice(words.NAMES), rng.choice(words.OBJECTS)
    value = literal(rng)
    place = rng.choice(words.PLACES)
    shade = rng.choice(words.LISTS["colors"]).lower()
    age = rng.randint(3, 99)
    cases: list[tuple[str, str, str]] = [
        (f"The {thing} is {shade}. What color is the {thing}?", f"The {thing} is {shade}.",
         shade.capitalize()),
        (f"{name} lives in {place}. Where does {name} live?", f"{name} lives in {place}.", place),
        (f"The password is {value}. What is the password?", f"The password is {value}.", value),
        (f"My name is {name}. What is my name?", f"Your name is {name}.", name),
        (f"{name} is {age} years old. How old is {name}?", f"{name} is {age} years old.", str(age)),
        (f"The code word is {value}. What is the code word?", f"The code word is {value}.", value),
        (f"{name} has a {thing}. What does {name} have?", f"{name} has a {thing}.",
         f"A {thing}"),
    ]  # fmt: skip
    text, answer, short = rng.choice(cases)
    return Question(
        text, answer, short, {"answer": short}, f"The user said it: {answer}", exact=True
    )


QUESTIONS: dict[str, Callable[[Random], Question]] = {
    "opposite": opposite,
    "colour": colour,
    "inflection": inflection,
    "translation": translation,
    "copy": copy,
    "test": this_is_a_test,
    "case": change_case,
    "spelling": spelling,
    "sentiment": sentiment,
    "extraction": extraction,
    "number word": number_word,
    "context": from_context,
}
