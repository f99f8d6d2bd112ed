"""`run_batch`, `bind`, `trace` and `cache`: checks T43 to T51."""

import asyncio
import collections
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import headrace as sgl
from headrace import assistant, function, gen, user
from tests.support.lang_server import LangServer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("endpoint")


@function
def qa(s: sgl.ProgramState, q: str, mark: str = "?") -> str:
    s += f"{q}{mark}" + gen("a")
    return q


def texts(states: list[Any]) -> list[str]:
    return [state.text() for state in states]


def test_t43_the_forms_of_a_batch() -> None:
    record = collections.namedtuple("record", ["Index", "q"])
    array = np.array([("a",), ("b",)], dtype=[("q", "U1")])
    expected = ["a? stub", "b? stub"]
    forms: list[Any] = [
        [{"q": "a"}, {"q": "b"}],
        (("a",), ("b",)),
        [["a"], ("b",)],
        [["a", "?"], {"q": "b"}],
        iter([{"q": "a"}, {"q": "b"}]),
        [record(0, "a"), record(1, "b")],
        array,
    ]
    for form in forms:
        assert texts(qa.run_batch(form)) == expected
    for wrong in ("ab", {"q": "a"}):
        with pytest.raises(TypeError, match="list"):
            qa.run_batch(wrong)
    for element in ("b", ("a", "b", "c"), {"unheard": 1}, {}, 3):
        with pytest.raises(TypeError, match="Element 1"):
            qa.run_batch([("a",), element])


def test_t44_small_batches(stub: LangServer) -> None:
    assert qa.run_batch([]) == []
    assert not stub.generations
    qa.run_batch([{"q": "x" * 100}])
    assert len(stub.generations) == 1
    states = qa.run_batch([{"q": "x" * 100 + str(i)} for i in range(5)], num_threads=1)
    assert len(stub.generations) == 6
    assert stub.most_open == 1
    assert [state.ret_value[-1] for state in states] == list("01234")


@pytest.mark.parametrize(("length", "sent"), [(100, 1), (64, 0)])
def test_t45_the_common_prefix_is_sent_once_and_first(
    stub: LangServer, length: int, sent: int
) -> None:
    prefix = "p" * length
    qa.run_batch([{"q": prefix + str(i)} for i in range(3)])
    limits = [payload["sampling_params"]["max_new_tokens"] for payload in stub.payloads]
    assert limits == [0] * sent + [128] * 3
    if sent:
        assert stub.texts[0] == prefix
    sgl.global_config.enable_precache_with_tracing = False
    try:
        qa.run_batch([{"q": prefix + str(i)} for i in range(3)])
    finally:
        sgl.global_config.enable_precache_with_tracing = True
    assert len(stub.generations) == sent + 6


def test_t46_a_body_runs_once_whatever_it_does() -> None:
    ran: list[str] = []
    table = {"a": 1, "b": 2}

    @function
    def ask(s: sgl.ProgramState, q: str) -> None:
        ran.append(q)
        s += f"{'x' * 100} {table[q]} {10 / table[q]}" + gen("a")

    states = ask.run_batch([{"q": "a"}, {"q": "b"}])
    assert sorted(ran) == ["a", "b"]
    assert [state.text()[100:] for state in states] == [" 1 10.0 stub", " 2 5.0 stub"]


def test_t47_a_body_that_raises() -> None:
    @function
    def ask(s: sgl.ProgramState, q: int) -> None:
        s += f"{q}" + gen("a")
        if q == 1:
            raise LookupError("lost")

    elements = [{"q": q} for q in range(3)]
    with pytest.raises(LookupError, match="lost") as raised:
        ask.run_batch(elements)
    assert "element 1" in raised.value.__notes__[0]
    kept = ask.run_batch(elements, return_exceptions=True)
    assert isinstance(kept[1], LookupError)
    assert (kept[0]["a"], kept[2]["a"]) == (" stub", " stub")


def test_t48_a_generation_that_fails(stub: LangServer) -> None:
    @function
    def reads(s: sgl.ProgramState, q: str) -> str:
        s += q + gen("a")
        return str(s["a"])

    stub.answer = lambda payload: (
        (500, {"error": {"message": "boom"}}) if payload["text"] == "b" else " fine"
    )
    for program in (qa.bind(mark=""), reads):
        states = program.run_batch([("a",), ("b",), ("c",)])
        assert "boom" in str(states[1].error())
        assert [states[0]["a"], states[2]["a"]] == [" fine", " fine"]
        with pytest.raises(sgl.ProgramError, match="boom"):
            states[1]["a"]


def test_t49_a_batch_as_an_iterator(stub: LangServer) -> None:
    num_read = 0

    def elements() -> Iterator[dict[str, str]]:
        nonlocal num_read
        for i in range(1000):
            num_read += 1
            yield {"q": f"{i} "}

    states = qa.run_batch(elements(), generator_style=True)
    assert next(states).ret_value == "0 "
    assert num_read < 1000
    assert [next(states).ret_value for _ in range(50)] == [f"{i} " for i in range(1, 51)]
    states.close()
    after = num_read
    until(lambda: stub.num_open == 0)
    assert after == num_read < 1000
    whole = qa.run_batch(elements(), generator_style=True)
    assert [state.ret_value for state in whole] == [f"{i} " for i in range(1000)]


def test_t50_the_bar_and_the_callers_dictionaries(capfd: pytest.CaptureFixture[str]) -> None:
    elements = [{"q": "a"}, {"q": "b"}]
    qa.bind(mark="!").run_batch(elements, progress_bar=True)
    assert "2/2" in capfd.readouterr().err
    assert elements == [{"q": "a"}, {"q": "b"}]


def test_t51_bind(stub: LangServer) -> None:
    bound = qa.bind(q="b").bind(mark="!")
    assert bound.run().text() == "b! stub"
    assert bound.run(mark=".").text() == "b. stub"
    assert qa.run("x").text() == "x? stub"
    assert qa.bind_arguments == {}
    assert function(qa.func, num_api_spec_tokens=4).bind(q="b").num_api_spec_tokens == 4
    assert texts(bound.run_batch([{}, {"mark": ","}])) == ["b! stub", "b, stub"]
    with pytest.raises(TypeError, match="unheard"):
        qa.bind(unheard=1)
    assert [repr(node) for node in bound.trace().nodes] == [
        "%0 = Constant('b!')",
        "%1 = Gen('a')",
    ]
    stub.requests.clear()
    qa.bind(q="p" * 100).cache()
    assert [p["sampling_params"]["max_new_tokens"] for p in stub.payloads] == [0]


def test_a_trace_has_symbols_and_sends_nothing(stub: LangServer) -> None:
    @function
    def inner(s: sgl.ProgramState, given: Any) -> None:
        s += "given " + given

    @function
    def chat(s: sgl.ProgramState, question: Any) -> Any:
        s += user("Q: " + question)
        s += assistant(gen("a"))
        forks = s.fork(2)
        forks[0] += "left"
        inner(s["a"])
        return "done"

    @function
    def formats(s: sgl.ProgramState, question: str) -> None:
        s += f"Q: {question}"

    state = chat.trace()
    assert state.ret_value == "done"
    dump = state.last_node.print_graph_dfs()
    assert "Argument(question)" in dump
    assert "Gen('a')" in dump
    assert "%0 = " in dump
    assert len(state.child_states) == 3
    assert len(state.flatten_nodes()) > len(state.nodes)
    with pytest.raises(TypeError):
        formats.trace()
    assert not stub.generations


def test_async_programs(stub: LangServer) -> None:
    @function
    async def ask(s: sgl.AsyncProgramState, q: str) -> str:
        s += q + gen("a")
        first = await s["a"]
        forks = await s.fork(2)
        forks += lambda i: f"{i}" + gen("v")
        await forks.join()
        values = await s["v"]
        async with s.copy() as child:
            child += gen("c")
        return f"{first}{values}{await s['c']}{len(await s.text())}"

    expected = " stub[' stub', ' stub'][' stub']6"
    assert ask.run("x").ret_value == expected
    assert [s.ret_value for s in ask.run_batch([("x",), ("y",)])] == [expected] * 2

    async def main() -> None:
        state = await ask.arun("x")
        assert state.ret_value == expected
        assert state["a"] == " stub"
        plain, *_ = await asyncio.gather(*(qa.arun("x") for _ in range(20)))
        assert plain["a"] == " stub"
        states = await ask.arun_batch([("x",), ("y",)], concurrency=2)
        assert [state.ret_value for state in states] == [expected] * 2
        stub.hold.clear()
        running = asyncio.create_task(ask.arun("x"))
        await asyncio.to_thread(until, lambda: stub.num_open == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        stub.hold.set()

    asyncio.run(main())
    asyncio.run(main())
