"""Small programs that use each part of the frontend language, to test a back end.

Each function runs a program on the back end of `set_default_backend`. It raises `AssertionError` if
the back end breaks a rule of the language. No result depends on the quality of the model.
"""

from __future__ import annotations

import json
import re

import headrace as sgl
from headrace.lang.state import ProgramState


def test_mt_bench() -> None:
    """Test a conversation of two questions, of which the second continues the first."""

    @sgl.function
    def answer(s: ProgramState, first: str, second: str) -> None:
        s += sgl.system("You are a helpful assistant.")
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("answer_1", max_tokens=16))
        with s.user():
            s += second
        s += sgl.assistant_begin()
        s += sgl.gen("answer_2", max_tokens=16)
        s += sgl.assistant_end()

    state = answer.run("Name a colour.", "Name another one.", temperature=0.1)
    roles = [message["role"] for message in state.messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert state["answer_1"] in state.text()
    assert state["answer_2"] in state.text()


def test_select() -> None:
    """Test that `select` returns one of its choices, which then is part of the text."""

    @sgl.function
    def judge(s: ProgramState, statement: str) -> None:
        s += sgl.user(f"True or false: {statement}")
        s += sgl.assistant("It is " + sgl.select("verdict", ["true", "false"]) + ".")

    state = judge.run("the sky is blue")
    assert state["verdict"] in ("true", "false")
    assert state.messages()[-1]["content"] == f"It is {state['verdict']}."


def test_decode_int() -> None:
    """Test that a generation with `dtype=int` is an integer."""

    @sgl.function
    def count(s: ProgramState) -> None:
        s += sgl.user("How many legs has a dog?")
        s += sgl.assistant(sgl.gen_int("legs", max_tokens=8))

    int(count.run(temperature=0)["legs"])


def test_decode_json() -> None:
    """Test that a generation with `json_schema` is JSON that follows the schema."""
    colour = {"type": "string", "enum": ["red", "green"]}
    schema = {"type": "object", "properties": {"colour": colour}, "required": ["colour"]}

    @sgl.function
    def describe(s: ProgramState) -> None:
        s += sgl.user("Describe an apple as JSON.")
        s += sgl.assistant(sgl.gen("json", max_tokens=64, json_schema=json.dumps(schema)))

    assert json.loads(describe.run(temperature=0)["json"])["colour"] in ("red", "green")


def test_regex() -> None:
    """Test that a generation with `regex` matches the whole expression."""
    pattern = r"[0-9]{1,3}\.[0-9]{1,3}"

    @sgl.function
    def address(s: ProgramState) -> None:
        s += sgl.user("The first half of an IP address?")
        s += sgl.assistant(sgl.gen("address", max_tokens=16, regex=pattern))

    assert re.fullmatch(pattern, address.run(temperature=0)["address"])


def test_tool_use() -> None:
    """Test a program that reads a `select` and then takes one of several branches."""

    @sgl.function
    def solve(s: ProgramState, question: str) -> None:
        s += sgl.user(question)
        with s.assistant():
            s += "I use the " + sgl.gen("tool", choices=["calculator", "dictionary"]) + ": "
            name = "sum" if s["tool"] == "calculator" else "word"
            s += sgl.gen(name, max_tokens=8)

    state = solve.run("What is 2 * 2?")
    state.sync()
    assert (state["tool"] == "calculator") == ("sum" in state)
    assert (state["tool"] == "dictionary") == ("word" in state)


def test_parallel_decoding() -> None:
    """Test that children of `fork` continue independently, and that their variables can be read."""

    @sgl.function
    def tips(s: ProgramState) -> None:
        s += sgl.user("Give two tips.")
        forks = s.fork(2)
        for index, fork in enumerate(forks):
            fork += sgl.assistant(f"Tip {index + 1}: " + sgl.gen("tip", max_tokens=8))
        forks.join()

    state = tips.run()
    assert len(state["tip"]) == 2


def test_stream() -> None:
    """Test that the pieces of a stream together are the whole text."""

    @sgl.function
    def tell(s: ProgramState) -> None:
        s += sgl.user("Say something.")
        s += sgl.assistant(sgl.gen("said", max_tokens=16))

    state = tell.run(stream=True)
    assert "".join(state.text_iter()) == state.text()
    assert "".join(state.text_iter("said")) == state["said"]


def test_batch() -> None:
    """Test that `run_batch` returns the states in the order of its arguments."""

    @sgl.function
    def ask(s: ProgramState, number: int) -> None:
        s += sgl.user(f"What follows {number}?")
        s += sgl.assistant(sgl.gen("next", max_tokens=4))

    states = ask.run_batch([{"number": number} for number in range(8)], temperature=0)
    for number, state in enumerate(states):
        assert f"What follows {number}?" in state.text()
        assert state.error() is None
