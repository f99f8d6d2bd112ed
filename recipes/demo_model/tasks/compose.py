"""Turns a question into a chat: plain, short, JSON, thinking, with earlier turns."""

import json
from collections.abc import Callable
from random import Random

from recipes.demo_model.conversation import Chat, Message, Question
from recipes.demo_model.phrasing import spoken, system_prompt
from recipes.demo_model.tasks import geography

QuestionMaker = Callable[[Random], Question]

_SHORT = [
    "{q} Answer in one word.", "{q} Just the answer.", "{q} Only the answer, please.",
    "{q} Answer briefly.", "{q} Reply with only the answer.", "{q} Answer with a single word.",
    "{q} Be brief.", "{q} One word answer.", "Answer in one word: {q}", "Answer briefly: {q}",
]  # fmt: skip
_SHORT_SYSTEM = [
    "Answer in one word.", "Reply with only the answer.", "Answer briefly.",
    "You answer with a single word.", "Be as brief as possible.",
]  # fmt: skip
_JSON = ["{q} Answer in JSON.", "{q} Reply in JSON.", "Answer in JSON: {q}", "{q} Return JSON."]


def _opening(rng: Random, chance: float = 0.3) -> list[Message]:
    if rng.random() < chance:
        return [{"role": "system", "content": system_prompt(rng)}]
    return []


def single(rng: Random, question: Question) -> Chat:
    """One question, in one of the styles."""
    roll = rng.random()
    brief = len(question.short) < 30 and question.short != question.answer
    if roll < 0.09 and brief:
        messages = _opening(rng)
        request = rng.choice(_SHORT).format(q=question.text)
        messages.append({"role": "user", "content": request})
        return Chat(messages, question.short)
    if roll < 0.12 and brief:
        messages = [
            {"role": "system", "content": rng.choice(_SHORT_SYSTEM)},
            {"role": "user", "content": spoken(rng, question)},
        ]
        return Chat(messages, question.short)
    if roll < 0.16 and question.data:
        messages = _opening(rng)
        messages.append({"role": "user", "content": rng.choice(_JSON).format(q=question.text)})
        return Chat(messages, json.dumps(question.data, ensure_ascii=False))
    messages = _opening(rng)
    messages.append({"role": "user", "content": spoken(rng, question)})
    thought = question.thought if question.thought and roll > 0.86 else None
    return Chat(messages, question.answer, thought=thought)


def several(rng: Random, maker: QuestionMaker, turns: int | None = None) -> Chat:
    """A few questions in one chat, or as many as `turns` says."""
    messages = _opening(rng)
    for _ in range(turns or rng.choice([1, 1, 2, 2, 3, 5])):
        question = maker(rng)
        messages.append({"role": "user", "content": spoken(rng, question)})
        messages.append({"role": "assistant", "content": question.answer})
    last = maker(rng)
    messages.append({"role": "user", "content": spoken(rng, last)})
    thought = last.thought if last.thought and rng.random() < 0.15 else None
    return Chat(messages, last.answer, thought=thought)


_AND = ["And of {c}?", "And {c}?", "What about {c}?", "And the one of {c}?", "How about {c}?",
        "And for {c}?", "Now {c}.", "Same question for {c}.", "and {c}"]  # fmt: skip
_FOLLOWED: list[tuple[QuestionMaker, str]] = [
    (geography.capital, "capital"),
    (geography.capital, "capital"),
    (geography.capital, "capital"),
    (geography.currency, "currency"),
    (geography.language, "language"),
    (geography.continent, "continent"),
]


def follow_up(rng: Random) -> Chat:
    """A question, then a short follow-up that asks the same about another country."""
    maker, kind = rng.choice(_FOLLOWED)
    messages = _opening(rng)
    first = maker(rng)
    messages.append({"role": "user", "content": spoken(rng, first)})
    messages.append({"role": "assistant", "content": first.answer})
    for _ in range(rng.choice([1, 1, 2, 3])):
        last = maker(rng)
        name = f"the {last.data['country']}"
        name = name if name in last.answer.lower() or name in last.answer else name[4:]
        messages.append({"role": "user", "content": rng.choice(_AND).format(c=name)})
        messages.append({"role": "assistant", "content": last.answer})
    answer = messages.pop()["content"]
    thought = f"The user asks the same about {name}: the {kind}." if rng.random() < 0.1 else None
    return Chat(messages, answer, thought=thought)


def recall(rng: Random, filler: QuestionMaker, name: str) -> Chat:
    """The user says their name, talks of something else, then asks for the name."""
    messages = _opening(rng)
    messages.append({"role": "user", "content": f"My name is {name}."})
    messages.append({"role": "assistant", "content": f"Hello, {name}! How can I help you?"})
    for _ in range(rng.choice([0, 0, 1, 2])):
        question = filler(rng)
        messages.append({"role": "user", "content": question.text})
        messages.append({"role": "assistant", "content": question.answer})
    asked = rng.choice(["What is my name?", "Who am I?", "Do you remember my name?"])
    messages.append({"role": "user", "content": asked})
    return Chat(messages, f"Your name is {name}.")
