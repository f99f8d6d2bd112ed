"""Types of language programs; `make check` runs mypy over this file."""

from typing import Any, assert_type

import pydantic

import headrace as sgl
from headrace.lang.function import SglFunction
from headrace.lang.ir import SglGen, SglSelect


class Person(pydantic.BaseModel):
    name: str


number = sgl.gen("n", dtype=int)
person = sgl.gen("p", schema=Person, temperature=0.5)


@sgl.function
def ask(s: sgl.ProgramState, question: str, times: int = 1) -> float:
    s += sgl.user(question * times)
    s += sgl.assistant("I say " + number + person)
    assert_type(s[number], int)
    assert_type(s.value(person), Person)
    assert_type(s.value("n", float), float)
    return 0.5


@sgl.function
async def ask_async(s: sgl.AsyncProgramState, question: str) -> str:
    s += sgl.user(question) + sgl.assistant(person)
    assert_type(await s[number], int)
    assert_type(await s.value(person), Person)
    assert_type((await s[person]).name, str)
    return "x"


@sgl.function()
def bare(s: sgl.ProgramState) -> None: ...


def check_types() -> None:
    assert_type(number, SglGen[int])
    assert_type(person, SglGen[Person])
    assert_type(sgl.gen("x"), SglGen[str])
    assert_type(sgl.gen("x", choices=["a", "b"]), SglSelect)
    state = ask("Hi", times=2)
    assert_type(state, sgl.ProgramState)
    assert_type(state[number], int)
    assert_type(state[person], Person)
    assert_type(state["n"], Any)
    assert_type(ask_async.run_batch([("a",)]), list[sgl.ProgramState])
    assert_type(bare, SglFunction[..., None])
    # What does not fit is refused: an unused "ignore" would be an error.
    ask(3)  # type: ignore[arg-type]
    ask("Hi", unheard=1)  # type: ignore[call-arg]
    ask()  # type: ignore[call-arg]
    sgl.gen("x", max_tokens="many")  # type: ignore[call-overload]
    sgl.gen("x") + 3  # type: ignore[operator]
