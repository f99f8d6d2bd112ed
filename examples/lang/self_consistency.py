"""Sample many answers and take the most frequent one (self-consistency).

Run `python examples/lang/self_consistency.py --url URL`.
"""

import argparse
import re
from collections import Counter
from typing import Any

import headrace as sgl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
NUM_SAMPLES = 8


@sgl.function
def vote(s: Any, question: str) -> Counter[int]:
    s += sgl.user(question)
    # The prompt is computed once; the forks continue after it.
    forks = s.fork(NUM_SAMPLES)
    for fork in forks:
        fork += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0.9))
    # The last number of each answer, if there is one.
    numbers = (re.findall(r"\d+", fork["answer"]) for fork in forks)
    return Counter(int(each[-1]) for each in numbers if each)


if __name__ == "__main__":
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().url))
    votes = vote.run("What is 17 + 25?").ret_value
    print("Votes:", dict(votes.most_common()))
    print("Answer:", votes.most_common(1)[0][0])
