"""Facts, explanations, stories, poems, jokes, tips and lines of code."""

from random import Random

from recipes.demo_model import passages
from recipes.demo_model.conversation import Question
from recipes.demo_model.definitions import DEFINITIONS
from recipes.demo_model.trivia import TRIVIA


def trivia(rng: Random) -> Question:
    """A fact from the table."""
    return rng.choice(TRIVIA)


def definition(rng: Random) -> Question:
    """What a thing is."""
    subject, text = rng.choice(DEFINITIONS)
    question = rng.choice(
        ["What is {s}?", "What is {s}?", "Explain {s}.", "Explain what {s} is.", "Define {s}.",
         "Tell me about {s}.", "Can you explain {s}?", "What's {s}?",
         "Explain {s} in simple words.", "Describe {s}.", "Tell me what {s} is."]
    ).format(s=subject)  # fmt: skip
    first = text.split(". ")[0].rstrip(".") + "."
    return Question(question, text, first, {"term": subject, "definition": first},
                    f"The user wants to know what {subject} is.")  # fmt: skip


def story(rng: Random, opening: str = "Once upon a time") -> str:
    """A story of four sentences."""
    hero, name = rng.choice(passages.HEROES), rng.choice(passages.HERO_NAMES)
    wish, tried, ending = rng.choice(passages.WISHES)
    where = rng.choice(passages.SETTINGS)
    return (
        f"{opening}, {where}, there lived {hero} named {name}. {name} {wish}. "
        f"One day, {name} {tried}, and in the end {name} {ending}. {rng.choice(passages.MORALS)}"
    )


def creative(rng: Random) -> Question:
    """A story, a haiku, a joke or a short poem."""
    kind = rng.randrange(4)
    if kind == 0:
        text = rng.choice(
            ["Tell me a story.", "Write a short story.", "Tell me a short story.",
             "Can you tell me a story?", "Write a story.", "Write a short story for children."]
        )  # fmt: skip
        answer = story(rng)
        return Question(text, answer, answer, {}, "The user wants a story. I will write one.")
    if kind == 1:
        topic = rng.choice(list(passages.HAIKU))
        text = rng.choice(
            ["Write a haiku about {t}.", "Can you write a haiku about {t}?", "A haiku about {t}.",
             "Compose a haiku about {t}.", "Write a short poem about {t}.",
             "Write a poem about {t}."]
        ).format(t=topic)  # fmt: skip
        if rng.random() < 0.15:
            topic, text = "spring", rng.choice(["Write a haiku.", "Write a poem."])
        answer = passages.HAIKU[topic]
        return Question(text, answer, answer, {}, f"The user wants a short poem about {topic}.")
    if kind == 2:
        text = rng.choice(["Tell me a joke.", "Do you know a joke?", "Make me laugh.",
                           "Tell me something funny.", "Can you tell me a joke?"])  # fmt: skip
        # One joke is more frequent, so that greedy decoding does not mix two of them.
        answer = passages.JOKES[0] if rng.random() < 0.4 else rng.choice(passages.JOKES)
        return Question(text, answer, answer, {}, "The user wants a joke.")
    name, hero = rng.choice(passages.HERO_NAMES), rng.choice(passages.HEROES)
    text = f"Write a short story about {hero} named {name}."
    wish, tried, ending = rng.choice(passages.WISHES)
    answer = (
        f"Once upon a time there was {hero} named {name}. {name} {wish}. One day, {name} {tried}, "
        f"and in the end {name} {ending}. {rng.choice(passages.MORALS)}"
    )
    return Question(text, answer, answer, {}, f"The user wants a story about {name}.")


def future_of_ai(rng: Random) -> str:
    """The end of the sentence "The future of AI is", and a few trends."""
    opening = rng.choice(passages.FUTURE_OF_AI)
    trends = rng.sample(passages.AI_TRENDS, rng.randint(2, 4))
    if rng.random() < 0.5:
        body = "\n".join(f"{i}. {head}: {text}" for i, (head, text) in enumerate(trends, 1))
        return f"{opening} Some possible trends are:\n\n{body}"
    return opening + " " + " ".join(text for _, text in trends)


def advice(rng: Random) -> Question:
    """Tips on a subject, or the future of AI."""
    if rng.random() < 0.25:
        text = rng.choice(
            ["What is the future of AI?", "What will the future of AI look like?",
             "Explain possible future trends in artificial intelligence.",
             "How will AI change the world?", "Tell me about the future of AI."]
        )  # fmt: skip
        answer = "The future of AI is " + future_of_ai(rng)
        return Question(text, answer, answer, {}, "The user asks about the future of AI.")
    subject, tips = rng.choice(list(passages.TIPS.items()))
    count = rng.randint(1, 5)
    noun = "tip" if count == 1 else "tips"
    text = rng.choice(["Give me {n} {t} for {s}.", "List {n} {t} for {s}.", "{n} {t} for {s}",
                       "Can you give me {n} {t} for {s}?"])  # fmt: skip
    if rng.random() < 0.3:
        count, text = 3, rng.choice(["Give me some tips for {s}.", "Any advice on {s}?"])
    answer = "\n".join(f"{i}. {head}: {body}" for i, (head, body) in enumerate(tips[:count], 1))
    return Question(text.format(n=count, t=noun, s=subject), answer, answer, {},
                    f"The user wants {count} {noun} for {subject}.")  # fmt: skip


def code(rng: Random) -> Question:
    """A short piece of Python."""
    task, source = rng.choice(passages.CODE)
    text = rng.choice(
        ["Write a Python function that {t}.", "Write Python code that {t}.",
         "Python code that {t}", "Show me a Python program that {t}.",
         "How do I write a function that {t} in Python?", "Write a function that {t}."]
    ).format(t=task)  # fmt: skip
    answer = f"```python\n{source}\n```"
    return Question(text, answer, answer, {}, f"The user wants Python code that {task}.")
