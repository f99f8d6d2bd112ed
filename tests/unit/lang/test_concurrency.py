"""Forks, joins, copies and threads: checks T21 to T32."""

import asyncio
import gc
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import headrace as sgl
from headrace import assistant, function, gen, user
from headrace.lang.backend.base import AsyncBackend, Generated, Prompt
from headrace.lang.core_loop import core
from headrace.lang.sampling import SglSamplingParams
from tests.support.lang_server import LangServer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("endpoint")


class Held(AsyncBackend):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waiting = 0
        self.most_waiting = 0
        self._released = asyncio.Event()

    def release(self) -> None:
        core().call_soon(self._released.set)

    async def async_generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        await self._released.wait()
        return "held", {"prompt_tokens": 1, "completion_tokens": 1}


@function
def short(s: sgl.ProgramState, i: int) -> None:
    s += f"{i}:" + gen("a")


def test_t21_children_run_at_once(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState) -> list[str]:
        s += "x"
        forks = s.fork(3)
        for child in forks:
            child += gen("a")
        until(lambda: stub.num_open == 3)
        stub.hold.set()
        return [child["a"] for child in forks]

    stub.hold.clear()
    assert ask().ret_value == [" stub"] * 3


def test_t22_run_does_not_wait_for_what_nobody_reads(stub: LangServer) -> None:
    stub.hold.clear()
    state = short(1)
    assert "a" not in state
    stub.hold.set()
    assert state.text() == "1: stub"


def test_t23_a_fork_has_what_its_parent_had(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState) -> Any:
        s += "x" + gen("a")
        forks = s.fork(2)
        assert "a" in s
        return forks

    children = ask().ret_value
    assert [child.text() for child in children] == ["x stub"] * 2
    assert [child["a"] for child in children] == [" stub"] * 2
    assert children[1].get_meta_info("a")["id"] == "stub"


def test_t24_join_gathers_lists(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += "x"
        s["own"] = "parent's"
        forks = s.fork(3)
        for i, child in enumerate(forks):
            child += f"{i}"
            child["own"] = i
            if i != 1:
                child += gen("some")
            child += gen("all")
        forks.join()

    stub.answer = lambda payload: payload["text"][1]
    state = ask()
    assert (state["all"], state["some"], state["own"]) == (["0", "1", "2"], ["0", "2"], "parent's")
    assert state.text() == "x"


def test_t25_forks_of_forks() -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += "r"
        outer = s.fork(2)
        for i, child in enumerate(outer):
            inner = child.fork(2)
            for j, grandchild in enumerate(inner):
                grandchild["v"] = (i, j)
            inner.join()
        outer.join()

    assert ask()["v"] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_t26_three_ways_to_append_to_children() -> None:
    @function
    def ask(s: sgl.ProgramState) -> Any:
        forks = s.fork(2)
        for i, child in enumerate(forks):
            child += f"a{i}"
        forks[0] += "b"
        forks[1] += "b"
        return forks

    forks = ask().ret_value
    assert [child.text() for child in forks] == ["a0b", "a1b"]
    assert len(forks) == 2
    assert forks[-1] is forks[1]
    with pytest.raises(ValueError, match="replaced"):
        forks[0] = forks[1]


def test_t27_appending_to_a_group() -> None:
    @function
    def ask(s: sgl.ProgramState) -> Any:
        forks = s.fork(2)
        forks += lambda i: f"{i}"
        forks += ["x", "y"]
        forks += "s" + gen("a")
        forks += "t"
        with pytest.raises(ValueError, match="3 values for 2 children"):
            forks += ["x", "y", "z"]
        return forks

    assert [child.text() for child in ask().ret_value] == ["0xs stubt", "1ys stubt"]


def test_t28_a_copy_leaves_the_text_alone() -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += "x"
        with s.copy() as child:
            child += "more" + gen("v")

    state = ask()
    assert state.text() == "x"
    assert state["v"] == [" stub"]


def test_t29_joining_texts(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += "base"
        forks = s.fork(2)
        forks += lambda i: f" {i}" + gen("a")
        forks.join("concate_and_append")
        s += "!" + gen("b")
        with pytest.raises(ValueError, match="appended to since"):
            forks.join("concate_and_append")
        with pytest.raises(ValueError, match="gather_variable"):
            forks.join("unheard")

    assert ask().text() == "base 0 stub 1 stub! stub"
    assert stub.texts[-1] == "base 0 stub 1 stub!"
    posted = {request.path for request in stub.requests if request.method == "POST"}
    assert posted == {"/generate"}


def test_t30_a_fork_inside_an_open_turn() -> None:
    @function
    def ask(s: sgl.ProgramState) -> Any:
        s += user("x")
        s += sgl.assistant_begin()
        forks = s.fork(2)
        forks += lambda i: f"{i}"
        forks += sgl.assistant_end()
        s += "own" + sgl.assistant_end()
        return forks

    state = ask()
    contents = [child.messages()[-1]["content"] for child in [*state.ret_value, state]]
    assert contents == ["0", "1", "own"]


def test_t31_tracing_is_the_tracers_alone() -> None:
    entered, leave = threading.Event(), threading.Event()

    @function
    def slow(s: sgl.ProgramState, x: str) -> None:
        entered.set()
        assert leave.wait(60)
        s += x

    tracing = threading.Thread(target=slow.trace)
    tracing.start()
    assert entered.wait(60)
    assert isinstance(short(1), sgl.ProgramState)
    leave.set()
    tracing.join()


def test_t32_many_programs_one_after_the_other() -> None:
    backend = Held()
    backend.release()
    short.run(0, backend=backend).sync()
    before = threading.active_count()
    for i in range(1000):
        assert short.run(i, backend=backend).text() == f"{i}:held"
    assert threading.active_count() <= before


def test_ten_thousand_live_programs_in_few_threads_and_little_memory() -> None:
    backend = Held()
    short.run(0, backend=backend)
    until(lambda: backend.num_waiting == 1)
    before = threading.active_count()
    states = [short.run(i, backend=backend) for i in range(9_000)]
    until(lambda: backend.num_waiting == 9_001)
    gc.collect()
    tracemalloc.start()
    states += [short.run(i, backend=backend) for i in range(1_000)]
    until(lambda: backend.num_waiting == 10_001)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used / 1_000 < 50_000
    assert threading.active_count() <= before
    backend.release()
    assert [state["a"] for state in states] == ["held"] * 10_000


def test_bodies_that_read_do_not_hold_each_other_up() -> None:
    @function
    def reads(s: sgl.ProgramState, i: int) -> str:
        s += f"{i}" + gen("a")
        return str(s["a"])

    backend = Held()
    batch: list[Any] = []
    elements = [{"i": i} for i in range(50)]
    thread = threading.Thread(
        target=lambda: batch.extend(reads.run_batch(elements, backend=backend))
    )
    thread.start()
    until(lambda: backend.num_waiting == 50)
    backend.release()
    thread.join()
    assert [state.ret_value for state in batch] == ["held"] * 50


def test_a_batch_inside_a_batch_ends() -> None:
    @function
    def outer(s: sgl.ProgramState, i: int) -> list[str]:
        return [state["a"] for state in short.run_batch([{"i": 1}, {"i": 2}])]

    states = outer.run_batch([{"i": i} for i in range(8)], num_threads=2)
    assert [state.ret_value for state in states] == [[" stub"] * 2] * 8


def test_the_common_text_of_children_is_cached_once(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += "x" * 100
        forks = s.fork(3)
        forks += assistant(gen("a"))
        forks.join()

    ask().sync()
    limits = [payload["sampling_params"]["max_new_tokens"] for payload in stub.payloads]
    assert limits == [0, 128, 128, 128]
    assert stub.texts[0] == "x" * 100


def test_waiting_on_the_frontends_own_loop_is_refused() -> None:
    @function
    async def ask(s: sgl.AsyncProgramState) -> None:
        inner = short(1)
        with pytest.raises(RuntimeError, match="awaitable"):
            inner.text()
        assert await inner.aio.text() == "1: stub"

    assert ask().error() is None


def test_ctrl_c_ends_a_batch() -> None:
    code = """
import os, signal, threading
import headrace as sgl
from tests.support.lang_server import LangServer
# Whoever started the tests in the background had this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
server = LangServer()
server.hold.clear()
sgl.set_default_backend(sgl.RuntimeEndpoint(server.url))
@sgl.function
def ask(s, i):
    s += f"{i}" + sgl.gen("a")
from tests.support.waiting import until
def press():
    until(lambda: server.num_open >= 20)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press, daemon=True).start()
try:
    ask.run_batch([{"i": i} for i in range(50)])
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).resolve().parents[3],
        check=False,
    )
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr


def test_ctrl_c_in_a_body_aborts_its_requests() -> None:
    @function
    def interrupted(s: sgl.ProgramState) -> None:
        kept.append(s)
        s += gen("a")
        raise KeyboardInterrupt

    kept: list[sgl.ProgramState] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(backend=Held())
    with pytest.raises(sgl.ProgramCancelled):
        kept[0]["a"]
