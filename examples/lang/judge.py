"""Use a model as a judge: `select` gives a verdict and its probability.

Run `python examples/lang/judge.py --url URL`.
"""

import argparse
from typing import Any

import headrace as sgl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
ANSWERS = ["Tokyo", "Rome", "Paris"]


@sgl.function
def judge(s: Any, answer: str) -> None:
    s += sgl.user(f"Is {answer} the capital of Japan?")
    s += sgl.assistant(sgl.select("verdict", ["Yes", "No"]))


if __name__ == "__main__":
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().url))
    states = judge.run_batch([{"answer": answer} for answer in ANSWERS])
    for answer, state in zip(ANSWERS, states, strict=True):
        sure = max(state.get_meta_info("verdict")["probs"])
        print(f"{answer}: {state['verdict']} ({sure:.0%} sure)")
