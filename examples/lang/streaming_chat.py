"""Chat, and print answers while they are generated. Without a QUESTION, type questions in.

Run `python examples/lang/streaming_chat.py --url URL [QUESTION ...]`.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import headrace as sgl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
parser.add_argument("questions", nargs="*")


@sgl.function
def chat(s: Any, prompt: str) -> None:
    s += sgl.system(prompt)


def questions(given: list[str]) -> Iterator[str]:
    yield from given
    while not given and (question := input("> ")):
        yield question


if __name__ == "__main__":
    options = parser.parse_args()
    sgl.set_default_backend(sgl.RuntimeEndpoint(options.url))
    state = chat.run("You are a helpful assistant.", stream=True, temperature=0)
    # The program has returned; its conversation can continue.
    for turn, question in enumerate(questions(options.questions)):
        state += sgl.user(question)
        state += sgl.assistant(sgl.gen(f"answer {turn}", max_tokens=128))
        for piece in state.text_iter(f"answer {turn}"):
            print(piece, end="", flush=True)
        print()
    usage = state.usage()
    print(f"({usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached)")
