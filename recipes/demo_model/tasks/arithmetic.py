"""Sums, differences, products, comparisons; the thought writes out the carrying."""

from random import Random

from recipes.demo_model.conversation import Question
from recipes.demo_model.words import NAMES, NUMBER_WORDS, OBJECTS

_SYMBOLS = {
    "+": ["+", "+", "+", "plus"],
    "-": ["-", "-", "-", "minus"],
    "*": ["*", "*", "x", "×", "times", "multiplied by"],
    "/": ["/", "/", "÷", "divided by"],
}
QUESTIONS = [
    "What is {e}?", "What is {e}?", "What is {e}?", "{e}", "{e} =", "{e}=?", "Calculate {e}.",
    "Compute {e}.", "How much is {e}?", "What's {e}?", "What does {e} equal?", "Solve {e}.",
    "{e}?", "What is the result of {e}?", "Can you calculate {e}?", "Please compute {e}.",
]  # fmt: skip


def is_held_out(left: int, right: int) -> bool:
    """Whether a pair of two-digit numbers is held out for the evaluation."""
    return left >= 10 and right >= 10 and (left * 7 + right * 13) % 10 == 3


def result_of(left: int, sign: str, right: int) -> int:
    """The value of `left sign right`; division is exact by construction."""
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    return left * right if sign == "*" else left // right


def _columns(left: int, right: int) -> str:
    """Column addition in words, the digits from the right."""
    steps, carry = [], 0
    first, second = str(left)[::-1], str(right)[::-1]
    for place in range(max(len(first), len(second))):
        a = int(first[place]) if place < len(first) else 0
        b = int(second[place]) if place < len(second) else 0
        total = a + b + carry
        carried = f" + {carry}" if carry else ""
        carry = total // 10
        steps.append(f"{a} + {b}{carried} = {total}" + (", carry 1" if carry else ""))
    return "; ".join(steps)


def thought_of(left: int, sign: str, right: int) -> str:
    """The working, in one line."""
    value = result_of(left, sign, right)
    if sign == "+" and max(left, right) >= 10:
        return f"Add the digits from the right: {_columns(left, right)}. So the sum is {value}."
    if sign == "*" and left > 10 and right < 10:
        tens, ones = left // 10 * 10, left % 10
        return (
            f"{tens} * {right} = {tens * right} and {ones} * {right} = {ones * right}. "
            f"Together that is {value}."
        )
    name = {"+": "sum", "-": "difference", "*": "product", "/": "quotient"}[sign]
    return f"The {name} of {left} and {right} is {value}."


def draw(rng: Random) -> tuple[int, str, int]:
    """An operation whose operands are small enough for a toy."""
    kind = rng.random()
    while True:
        if kind < 0.38:
            sign, size = "+", rng.choice([10, 30, 100, 100, 100, 100, 1000])
            left, right = rng.randrange(size), rng.randrange(size)
        elif kind < 0.72:
            sign, size = "-", rng.choice([10, 20, 100, 100, 100, 1000])
            left, right = rng.randrange(size), rng.randrange(size)
            if left < right and rng.random() < 0.9:
                left, right = right, left
        elif kind < 0.92:
            sign, left, right = "*", rng.randrange(13), rng.randrange(13)
            if rng.random() < 0.2:
                left, right = rng.randrange(10, 100), rng.randrange(2, 10)
        else:
            sign, right = "/", rng.randrange(1, 13)
            left = right * rng.randrange(13)
        if not is_held_out(left, right):
            return left, sign, right


def written(rng: Random, left: int, sign: str, right: int) -> str:
    """The operation as a user may write it."""
    symbol = rng.choice(_SYMBOLS[sign])
    if symbol in "+-*/x×÷":
        return f"{left}{symbol}{right}" if rng.random() < 0.2 else f"{left} {symbol} {right}"
    if max(left, right) <= 20 and rng.random() < 0.3:
        return f"{NUMBER_WORDS[left]} {symbol} {NUMBER_WORDS[right]}"
    return f"{left} {symbol} {right}"


def operation(rng: Random) -> Question:
    """One operation on two numbers."""
    left, sign, right = draw(rng)
    value = result_of(left, sign, right)
    return Question(
        rng.choice(QUESTIONS).format(e=written(rng, left, sign, right)),
        f"{left} {sign} {right} = {value}.",
        str(value),
        {"expression": f"{left} {sign} {right}", "result": value},
        thought_of(left, sign, right),
    )


def story_problem(rng: Random) -> Question:
    """A sum or a difference in the form of a story."""
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    left, right = rng.randrange(2, 50), rng.randrange(1, 50)
    sign = rng.choice("+-*")
    if sign == "-" and left < right:
        left, right = right + 1, left
    if sign == "*":
        left, right = rng.randrange(2, 11), rng.randrange(2, 11)
    text = {
        "+": f"{name} has {left} {thing}s and gets {right} more. How many does {name} have now?",
        "-": f"{name} has {left} {thing}s and gives away {right}. How many are left?",
        "*": f"{name} has {left} boxes with {right} {thing}s each. How many {thing}s are there?",
    }[sign]
    value = result_of(left, sign, right)
    return Question(
        text,
        f"{left} {sign} {right} = {value}, so the answer is {value}.",
        str(value),
        {"answer": value},
        thought_of(left, sign, right),
    )


def comparison(rng: Random) -> Question:
    """The larger or the smaller of two numbers."""
    size = rng.choice([10, 100, 100, 1000])
    left, right = rng.sample(range(size), 2)
    larger = rng.random() < 0.6
    value = max(left, right) if larger else min(left, right)
    word = rng.choice(["larger", "bigger", "greater"] if larger else ["smaller", "less"])
    text = rng.choice(
        [
            "Which is {w}, {a} or {b}?",
            "Which number is {w}: {a} or {b}?",
            "What is {w}, {a} or {b}?",
        ]
    ).format(w=word, a=left, b=right)
    other = left + right - value
    return Question(
        text,
        f"{value} is {word} than {other}.",
        str(value),
        {"answer": value},
        f"Compare {left} and {right}. {value} is {word}.",
    )


def extreme(rng: Random) -> Question:
    """The largest or smallest of a short list, or the list sorted."""
    numbers = rng.sample(range(100), rng.randint(3, 5))
    listed = ", ".join(map(str, numbers))
    kind = rng.randrange(3)
    if kind == 2:
        ordered = ", ".join(map(str, sorted(numbers)))
        return Question(
            rng.choice(["Sort these numbers: {n}.", "Put these numbers in order: {n}."]).format(
                n=listed
            ),
            ordered,
            ordered,
            {"sorted": sorted(numbers)},
            f"From the smallest to the largest: {ordered}.",
        )
    word, value = ("largest", max(numbers)) if kind else ("smallest", min(numbers))
    return Question(
        f"What is the {word} of these numbers: {listed}?",
        f"The {word} number is {value}.",
        str(value),
        {"answer": value},
        f"Looking at {listed}, the {word} is {value}.",
    )


def parity(rng: Random) -> Question:
    """Whether a number is even or odd."""
    number = rng.randrange(rng.choice([10, 100, 1000]))
    word = "odd" if number % 2 else "even"
    if rng.random() < 0.5:
        asked = rng.choice(["even", "odd"])
        said = "Yes" if asked == word else "No"
        return Question(
            f"Is {number} {asked}?",
            f"{said}, {number} is {word}.",
            said,
            {"answer": asked == word},
            f"The last digit of {number} is {number % 10}, so it is {word}.",
        )
    return Question(
        f"Is {number} even or odd?",
        f"{number} is {word}.",
        word.capitalize(),
        {"number": number, "parity": word},
        f"The last digit of {number} is {number % 10}, so it is {word}.",
    )


def counting(rng: Random) -> Question:
    """Counting up or down, and the next number of a sequence."""
    kind = rng.randrange(4)
    if kind == 0:
        start, step = rng.randrange(20), rng.choice([1, 1, 2, 3, 5, 10])
        shown = [start + step * index for index in range(rng.randint(3, 5))]
        value = shown[-1] + step
        listed = ", ".join(map(str, shown))
        return Question(
            rng.choice(["What comes next: {n}?", "What is the next number: {n}, ...?"]).format(
                n=listed
            ),
            f"The next number is {value}.",
            str(value),
            {"next": value},
            f"Each number is {step} more than the one before. {shown[-1]} + {step} = {value}.",
        )
    if kind == 1:
        number = rng.randrange(200)
        after = rng.random() < 0.5
        value = number + 1 if after else max(number - 1, 0)
        number = value - 1 if after else value + 1
        word = "after" if after else "before"
        return Question(
            f"What number comes {word} {number}?",
            f"{value} comes {word} {number}.",
            str(value),
            {"answer": value},
            f"The number {word} {number} is {value}.",
        )
    start = 1 if rng.random() < 0.6 else rng.randrange(30)
    end = start + rng.randint(2, 14)
    run = range(start, end + 1) if rng.random() < 0.75 else range(end, start - 1, -1)
    listed = ", ".join(map(str, run))
    verb = rng.choice(["Count from {a} to {b}.", "Please count from {a} to {b}.",
                       "Can you count from {a} to {b}?",
                       "Write the numbers from {a} to {b}."])  # fmt: skip
    return Question(
        verb.format(a=run[0], b=run[-1]), listed, listed, {"numbers": list(run)}, "I will count."
    )
