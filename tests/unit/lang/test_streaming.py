"""Reading a program while it runs: checks T33 to T42."""

import asyncio
import json
import threading
from typing import Any

import pytest

import headrace as sgl
from headrace import assistant, function, gen, user
from headrace.lang.choices import ChoicesDecision
from tests.support.lang_server import LangServer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("endpoint")


@function
def two(s: sgl.ProgramState) -> None:
    s += user("Hi")
    s += assistant(gen("a") + " and " + gen("b"))


@function
def one(s: sgl.ProgramState) -> None:
    s += "x" + gen("a")


def chunk(text: str, count: int = 1) -> dict[str, Any]:
    return {"text": text, "meta_info": {"completion_tokens": count}}


def test_t33_the_pieces_make_up_the_text(stub: LangServer) -> None:
    stub.answer = lambda _: "some answer"
    stub.hold.clear()
    state = two.run(stream=True)
    pieces = state.text_iter()
    first = next(pieces)
    assert first.startswith("<|im_start|>system\n")
    # What is there comes before what is not.
    until(lambda: stub.num_open == 1)
    stub.hold.set()
    assert first + "".join(pieces) == state.text()
    assert state.text().endswith("<|im_end|>\n")


def test_t34_the_pieces_of_a_later_variable(stub: LangServer) -> None:
    stub.answer = lambda payload: "second" if " and " in payload["text"] else "first"
    state = two.run(stream=True)
    pieces = list(state.text_iter("b"))
    assert "".join(pieces) == state["b"] == "second"
    # Both iterators and the value wait without polling: nothing ran but what was woken.
    assert "".join(state.text_iter("a")) == "first"


def test_t35_any_number_of_readers(stub: LangServer) -> None:
    stub.answer = lambda _: "some answer"
    state = two.run(stream=True)
    read: list[str] = []
    threads = [
        threading.Thread(target=lambda: read.append("".join(state.text_iter()))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read.append("".join(state.text_iter()))
    assert read == [state.text()] * 4
    assert "".join(state.text_iter("a")) == "".join(state.text_iter("a")) == "some answer"


def test_t36_a_choice_a_missing_name_and_no_stream() -> None:
    class Chooser(sgl.AsyncBackend):
        async def async_select(self, s: Any, choices: Any, temperature: Any, method: Any) -> Any:
            return ChoicesDecision(choices[1], {})

    @function
    def ask(s: sgl.ProgramState) -> None:
        s += "x" + gen("c", choices=["left", "right"])

    state = ask.run(stream=True, backend=Chooser())
    assert list(state.text_iter("c")) == ["right"]
    with pytest.raises(KeyError, match="unheard"):
        list(state.text_iter("unheard"))
    assert list(one.run().text_iter()) == ["x stub"]
    assert list(one.run().text_iter("a")) == [" stub"]


async def test_t37_two_hundred_async_readers(stub: LangServer) -> None:
    stub.answer = lambda _: "twelve chars"

    async def read() -> str:
        text, last = "", 0
        state = one.run(stream=True)
        async for delta, meta in state.text_async_iter("a", return_meta_data=True):
            assert meta["completion_tokens"] >= last
            last = meta["completion_tokens"]
            text += delta
        return text

    assert await asyncio.gather(*(read() for _ in range(200))) == ["twelve chars"] * 200


def test_t38_characters_of_several_bytes_and_line_separators(stub: LangServer) -> None:
    text = "日本語 \U0001f600 a\u2028b\u2029c\x85d"
    stub.piece_chars = 1
    stub.answer = lambda _: text
    state = one.run(stream=True)
    assert "".join(state.text_iter("a")) == state["a"] == text


def test_t40_a_childs_stream_beside_its_parents(stub: LangServer) -> None:
    stub.answer = lambda payload: f"<{payload['text']}>"

    @function
    def ask(s: sgl.ProgramState) -> Any:
        s += "p"
        (child,) = s.fork(1)
        child += "c" + gen("v")
        s += gen("v")
        return child

    state = ask.run(stream=True)
    assert "".join(state.text_iter("v")) == "<p>"
    assert "".join(state.ret_value.text_iter("v")) == "<pc>"
    assert "".join(state.ret_value.text_iter()) == "pc<pc>"


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"error": {"message": "out of pages"}}, "out of pages"),
        (ConnectionResetError, "ended too early"),
    ],
)
def test_t41_a_stream_that_fails(stub: LangServer, last: Any, words: str) -> None:
    def broken() -> None:
        raise ConnectionResetError

    event = last if isinstance(last, dict) else broken
    stub.answer = lambda _: [chunk("so"), chunk("so far"), event]
    for name, expected in ((None, "xso far"), ("a", "so far")):
        state = one.run(stream=True)
        read: list[str] = []
        with pytest.raises(sgl.ProgramError, match=words):
            read.extend(state.text_iter(name))
        assert "".join(read) == expected
        assert state.error() is not None
        assert state.text() == "xso far"


def forever(stub: LangServer) -> None:
    events: list[Any] = []
    for count in range(5000):
        events += [chunk("." * (count + 1), count), lambda: pause.wait(0.005)]
    pause = threading.Event()
    stub.answer = lambda _: events


def test_t42_leaving_the_loop_aborts_the_request(stub: LangServer) -> None:
    forever(stub)
    state = one.run(stream=True)
    for count, _ in enumerate(state.text_iter("a")):
        if count == 2:
            break
    assert stub.generations[0].was_aborted.wait(30)
    with pytest.raises(sgl.ProgramCancelled):
        state["a"]
    assert state.text().startswith("x.")


async def test_t42_leaving_an_async_loop_too(stub: LangServer) -> None:
    forever(stub)
    state = one.run(stream=True)
    async for _ in state.text_async_iter():
        if len(state.stream_executor.text_) > 3:
            break
    assert await asyncio.to_thread(stub.generations[0].was_aborted.wait, 30)


def test_one_of_two_readers_may_leave(stub: LangServer) -> None:
    stub.answer = lambda _: "some answer"
    state = one.run(stream=True)
    stays = state.text_iter("a")
    first = next(stays)
    leaves = state.text_iter("a")
    next(leaves)
    leaves.close()
    assert first + "".join(stays) == "some answer"


def test_cancelling_a_program(stub: LangServer) -> None:
    stub.hold.clear()
    state = one.run()
    until(lambda: stub.num_open == 1)
    state.cancel()
    with pytest.raises(sgl.ProgramCancelled):
        state["a"]
    assert state.text() == "x"
    with pytest.raises(sgl.ProgramCancelled):
        state += "more"
    stub.hold.set()


def test_a_program_has_its_time(stub: LangServer) -> None:
    stub.hold.clear()
    state = one.run(timeout=0.1)
    with pytest.raises(sgl.ProgramTimeout, match=r"not done within 0\.1 s"):
        state["a"]
    assert state.text() == "x"
    stub.hold.set()


def test_one_that_is_done_in_time_goes_on_afterwards(stub: LangServer) -> None:
    stub.answer = lambda _: "in time"
    state = one.run(timeout=30)
    assert state["a"] == "in time"
    state += gen("b")
    assert state["b"] == "in time"


def test_of_a_batch_each_program_has_its_time(stub: LangServer) -> None:
    stub.hold.clear()
    first, second = one.run_batch([{}, {}], timeout=0.1)
    stub.hold.set()
    assert isinstance(first.error(), sgl.ProgramTimeout)
    assert isinstance(second.error(), sgl.ProgramTimeout)


def test_what_a_program_made_can_be_written(stub: LangServer) -> None:
    stub.answer = lambda _: "an answer"
    state = two.run()
    state.set_var("kept", [1, 2])
    told = json.loads(json.dumps(state.to_dict()))
    assert told["function"] == "two"
    assert told["text"] == state.text()
    assert told["messages"][-1] == {"role": "assistant", "content": "an answer and an answer"}
    assert told["variables"] == {"a": "an answer", "b": "an answer", "kept": [1, 2]}
    assert told["meta_info"].keys() == {"a", "b"}
    assert told["usage"]["num_requests"] == 2
    assert told["error"] is None


async def test_what_a_program_that_failed_made_can_be_written_too(stub: LangServer) -> None:
    stub.hold.clear()
    state = one.run(timeout=0.1)
    told = await state.aio.to_dict()
    stub.hold.set()
    assert told["text"] == "x"
    assert "not done within" in told["error"]


def test_what_the_body_of_a_stream_raises_is_told() -> None:
    @function
    def bad(s: sgl.ProgramState) -> None:
        s += "x"
        raise LookupError("lost")

    state = bad.run(stream=True)
    with pytest.raises(LookupError, match="lost"):
        list(state.text_iter())
    assert isinstance(state.error(), LookupError)
    with pytest.raises(LookupError):
        state.ret_value  # noqa: B018 it raises


def test_a_server_that_streams_deltas(stub: LangServer) -> None:
    stub.model_info["incremental_streaming_output"] = True
    sgl.set_default_backend(sgl.RuntimeEndpoint(stub.url))
    stub.answer = lambda _: [chunk("ha"), chunk("ha"), chunk("ha!"), b"[DONE]"]
    state = one.run(stream=True)
    assert list(state.text_iter())[-1].endswith("!")
    assert state["a"] == "hahaha!"


def test_reasoning_is_taken_out_of_a_stream(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += user("Hi")
        s += sgl.separate_reasoning(assistant("So: " + gen("a")), model_type="qwen3")

    stub.answer = lambda _: "<think>\nhmm\n</think>\n\nyes"
    for stream in (False, True):
        state = ask.run(stream=stream)
        assert "".join(state.text_iter("a")) == state["a"] == "yes"
        assert state["a_reasoning_content"].strip() == "hmm"
        assert state.messages()[-1]["content"] == "So: yes"
        assert "think" not in state.text()
