"""Let a model use tools: it picks a tool and writes the argument, and Python runs the tool.

Run `python examples/lang/agent.py --url URL`.
"""

import argparse
import datetime
import operator
import re
from typing import Any

import headrace as sgl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SUM = r"[0-9]{1,4} [+*-] [0-9]{1,4}"


def calculate(task: str) -> str:
    left, sign, right = task.split()
    return str(SIGNS[sign](int(left), int(right)))


def weekday(day: str) -> str:
    return f"{datetime.date.fromisoformat(day):%A}"


# A tool: its function, and the form of its argument.
TOOLS = {
    "calculator": (calculate, SUM),
    "calendar": (weekday, r"20[0-9]{2}-0[1-9]-[01][1-9]"),
}


@sgl.function
def agent(s: Any, question: str) -> str:
    s += sgl.user(question)
    with s.assistant():
        s += "To answer I use the " + sgl.select("tool", list(TOOLS)) + ". "
        run, form = TOOLS[s["tool"]]
        s += "I ask it for: " + sgl.gen("argument", regex=form, max_tokens=16, temperature=0)
        found = re.fullmatch(form, s["argument"])
        s["result"] = run(s["argument"]) if found else "nothing"
        s += f"\nIt says {s['result']}."
    return f"{s['tool']}({s['argument']}) = {s['result']}"


if __name__ == "__main__":
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().url))
    state = agent.run("What is 23 + 19?")
    print(state.ret_value)
    print(state.text())
