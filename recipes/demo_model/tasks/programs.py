"""Forms that the frontend language writes: begun answers, two assistant turns in a row."""

from random import Random

from recipes.demo_model import passages
from recipes.demo_model.conversation import Chat, Message, Question
from recipes.demo_model.phrasing import system_prompt
from recipes.demo_model.tasks import arithmetic, geography

_DEFAULT_SYSTEM = "You are a helpful assistant."


def _system(rng: Random) -> list[Message]:
    text = _DEFAULT_SYSTEM if rng.random() < 0.6 else system_prompt(rng)
    return [{"role": "system", "content": text}] if rng.random() < 0.8 else []


def begun_answer(rng: Random, question: Question) -> Chat:
    """A question whose answer begins with words from the program."""
    asked = rng.choice(["Question: {q}", "{q}", "Q: {q}"]).format(q=question.text)
    messages = [*_system(rng), {"role": "user", "content": asked}]
    forced = rng.choice(["Answer: ", "A: ", "The answer is: ", "Sure! ", "Answer:"])
    text = question.answer if rng.random() < 0.6 else question.short
    return Chat(messages, forced + ("" if forced.endswith(" ") else " ") + text, forced=forced)


def tool_choice(rng: Random) -> Chat:
    """The model names the tool that it needs, then the expression or the key word."""
    calculator = rng.random() < 0.5
    question = arithmetic.operation(rng) if calculator else geography.capital(rng)
    tool = "calculator" if calculator else "search engine"
    opening = f"To answer this question: {question.text}. I need to use a "
    if rng.random() < 0.4:
        return Chat(_system(rng), f"{opening}{tool}.", forced=opening)
    messages = [*_system(rng), {"role": "assistant", "content": f"{opening}{tool}. "}]
    if calculator:
        left = question.answer.split(" = ")[0]
        return Chat(messages, f"The math expression is: {left}", forced="The math expression is: ")
    word = question.answer.removeprefix("The ").split(" is ")[0]
    forced = "The key word to search is: "
    return Chat(messages, forced + word, forced=forced)


def tips(rng: Random) -> Chat:
    """Two tips, one of them expanded, or both summed up."""
    subject, pairs = "staying healthy", passages.TIPS["staying healthy"]
    if rng.random() < 0.3:
        subject, pairs = rng.choice(list(passages.TIPS.items()))
    (first, first_text), (second, second_text) = pairs[:2]
    opening = f"Here are two tips for {subject}: 1. {first}. 2. {second}.\n\n"
    messages: list[Message] = [*_system(rng), {"role": "assistant", "content": opening}]
    if rng.random() < 0.6:
        index = rng.randrange(2)
        forced = f"Now, expand tip {index + 1} into a paragraph:\n"
        return Chat(messages, forced + (first_text, second_text)[index], forced=forced)
    for index, text in enumerate((first_text, second_text), 1):
        messages.append({"role": "assistant", "content": f"Tip {index}:{text}\n"})
    forced = "To summarize the above two tips, I can say:\n"
    summary = f"1. {first}: {first_text}\n2. {second}: {second_text}"
    return Chat(messages, forced + summary, forced=forced)
