"""Days, months, planets: what comes before and after."""

from random import Random

from recipes.demo_model.conversation import Question
from recipes.demo_model.words import DAYS, MONTH_DAYS, MONTHS, PLANETS, SEASONS


def neighbour(rng: Random) -> Question:
    """The day or month before or after another."""
    kind, items = rng.choice([("day", DAYS), ("month", MONTHS)])
    index, after = rng.randrange(len(items)), rng.random() < 0.5
    this, that = items[index], items[(index + (1 if after else -1)) % len(items)]
    word = "after" if after else "before"
    text = rng.choice(
        [
            "What {kind} comes {word} {this}?",
            "Which {kind} comes {word} {this}?",
            "What is the {kind} {word} {this}?",
            "Which {kind} is {word} {this}?",
            "What comes {word} {this}?",
            "{this} comes {other} which {kind}?",
        ]
    ).format(kind=kind, word=word, this=this, other="before" if after else "after")
    return Question(
        text,
        f"{that} comes {word} {this}.",
        that,
        {kind: that},
        f"The {kind} {word} {this} is {that}.",
    )


def tomorrow(rng: Random) -> Question:
    """If today is one day, tomorrow or yesterday is another."""
    index, after = rng.randrange(7), rng.random() < 0.6
    today, that = DAYS[index], DAYS[(index + (1 if after else -1)) % 7]
    word, verb = ("tomorrow", "is") if after else ("yesterday", "was")
    return Question(
        f"If today is {today}, what day {verb} {word}?",
        f"If today is {today}, {word} {verb} {that}.",
        that,
        {"day": that},
        f"The day {'after' if after else 'before'} {today} is {that}.",
    )


def month_number(rng: Random) -> Question:
    """The number or the length of a month."""
    index = rng.randrange(12)
    month, days = MONTHS[index], MONTH_DAYS[index]
    if rng.random() < 0.5:
        answer = f"{month} has {days} days."
        if index == 1:
            answer = "February has 28 days, and 29 in a leap year."
        return Question(
            f"How many days are in {month}?", answer, str(days), {"month": month, "days": days},
            f"The user asks for the length of {month}. It has {days} days.",
        )  # fmt: skip
    ending = {1: "st", 2: "nd", 3: "rd"}.get(index + 1, "th")
    return Question(
        f"What is the {index + 1}{ending} month of the year?",
        f"The {index + 1}{ending} month of the year is {month}.",
        month,
        {"number": index + 1, "month": month},
        f"Month number {index + 1} is {month}.",
    )


def series(rng: Random) -> Question:
    """All the days, months, seasons or planets in order."""
    noun, items = rng.choice(
        [
            ("days of the week", DAYS),
            ("months of the year", MONTHS),
            ("seasons", SEASONS),
            ("planets", PLANETS),
            ("planets of the solar system", PLANETS),
        ]
    )
    text = rng.choice(["List the {n}.", "What are the {n}?", "Name the {n}.", "Tell me the {n}."])
    listed = ", ".join(items[:-1]) + " and " + items[-1]
    answer = f"The {noun} are {listed}."
    if rng.random() < 0.3:
        text, answer = "List the {n} as a numbered list.", ""
        answer = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    return Question(
        text.format(n=noun),
        answer,
        ", ".join(items),
        {noun.split()[0]: items},
        f"There are {len(items)} {noun}.",
    )


def planet(rng: Random) -> Question:
    """The position of a planet."""
    index = rng.randrange(8)
    ordinal = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"][index]
    name = PLANETS[index]
    return Question(
        f"What is the {ordinal} planet from the sun?",
        f"The {ordinal} planet from the sun is {name}.",
        name,
        {"planet": name},
        f"Counting from the sun, the {ordinal} planet is {name}.",
    )
