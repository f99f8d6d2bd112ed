"""Generate several first steps, and continue the best of them (a tree of thoughts).

Run `python examples/lang/tree_of_thoughts.py --url URL`.

Branches share the text before them, so a server computes that text once. Branches of one level run
at once.
"""

import argparse
from typing import Any

import headrace as sgl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
WIDTH, KEPT, DEPTH = 3, 2, 2


def propose(branch: Any, level: int) -> None:
    branch += sgl.user(f"Step {level}: tell me something about Japan.")
    branch += sgl.assistant(sgl.gen("thought", max_tokens=24, stop="\n", temperature=0.5))
    branch += sgl.user("Is this a good step? Yes or no?")
    branch += sgl.assistant(sgl.select("verdict", ["Yes", "No"]))


def value(branch: Any) -> float:
    """Return how probable the model finds "yes"."""
    return branch.get_meta_info("verdict")["probs"][0]


@sgl.function
def tree(s: Any, question: str) -> list[str]:
    s += sgl.user(question)
    s += sgl.assistant("Let us think in steps.")
    beam = [s]
    for level in range(1, DEPTH + 1):
        branches = [branch for parent in beam for branch in parent.fork(WIDTH)]
        for branch in branches:
            propose(branch, level)
        beam = sorted(branches, key=value, reverse=True)[:KEPT]
    beam[0] += sgl.user(question)
    beam[0] += sgl.assistant(sgl.gen("answer", max_tokens=24, stop="\n", temperature=0))
    s["answer"] = beam[0]["answer"]
    return [message["content"] for message in beam[0].messages()]


if __name__ == "__main__":
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().url))
    state = tree.run("What is the capital of Japan?")
    for turn in state.ret_value:
        print("|", turn)
    print("Answer:", state["answer"])
    print("Tokens:", state.usage())
