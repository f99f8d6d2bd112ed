"""A model as a judge: `select` gives a verdict and how sure it is: `... --url URL`."""

import argparse
from typing import Any

import headrace as sgl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
QUESTION = "What is the capital of Japan?"
ANSWERS = ["The capital of Japan is Tokyo.", "The capital of Japan is Rome."]


@sgl.function
def judge(s: Any, question: str, answers: list[str]) -> None:
    s += sgl.user(question)
    s += sgl.assistant(sgl.select("better", answers))


if __name__ == "__main__":
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().url))
    # Both orders: a judge that likes the first place better would contradict itself.
    orders = [ANSWERS, ANSWERS[::-1]]
    states = judge.run_batch([{"question": QUESTION, "answers": order} for order in orders])
    for order, state in zip(orders, states, strict=True):
        probs = state.get_meta_info("better")["probs"]
        print(dict(zip(order, (round(prob, 3) for prob in probs), strict=True)))
    print("Agreed:", len({state["better"] for state in states}) == 1, "on", states[0]["better"])
