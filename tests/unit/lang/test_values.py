"""Forms, types, images and errors: checks T57 to T64."""

import base64
import io
import json
import pathlib
import re
from typing import Any

import pydantic
import pytest

import headrace as sgl
from headrace import assistant, function, gen, image, user
from headrace.lang.media_input import load_media
from tests.support.lang_server import LangServer

pytestmark = pytest.mark.usefixtures("endpoint")

PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)


class Person(pydantic.BaseModel):
    name: str
    age: int


def run(expression: Any) -> sgl.ProgramState:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += "x" + expression

    return ask()


def sampling(stub: LangServer) -> dict[str, Any]:
    found: dict[str, Any] = stub.payloads[-1]["sampling_params"]
    return found


def test_t57_an_invalid_regex_is_refused_where_it_stands(stub: LangServer) -> None:
    with pytest.raises(re.error):
        gen("a", regex="(")
    run(gen("a", regex=r"\d+")).sync()
    assert sampling(stub)["regex"] == r"\d+"


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [(int, "42 ", 42), (float, "-1.5", -1.5), (bool, "True", True), (str, '"ab c"', "ab c")],
)
def test_t58_types(stub: LangServer, dtype: type, text: str, value: Any) -> None:
    stub.answer = lambda _: text
    answer = gen("a", dtype=dtype, stop="!")
    state = run(answer)
    assert state["a"] == text
    assert state[answer] == state.value("a") == state.value("a", dtype) == value
    assert type(state[answer]) is dtype
    numbers = [" ", "\n"] if dtype in (int, float) else []
    assert sampling(stub)["stop"] == ["!", *numbers, "<|im_end|>"]
    assert re.fullmatch(sampling(stub)["regex"], text)
    assert run(gen("a", dtype=dtype.__name__))["a"] == text


def test_t58_other_types_are_refused(stub: LangServer) -> None:
    for wrong in (list, "list", bytes):
        with pytest.raises(ValueError, match="dtype"):
            gen("a", dtype=wrong)
    stub.answer = lambda _: "forty"
    state = run(sgl.gen_int("a"))
    with pytest.raises(ValueError, match=r"'a'.*'forty'"):
        state.value("a")
    with pytest.raises(TypeError, match="regex"):
        sgl.gen_string("a", regex="x")


def test_t58_a_warning_where_dtype_wins(stub: LangServer) -> None:
    with pytest.warns(UserWarning, match="dtype wins"):
        gen("a", dtype=int, regex="x")


def test_t59_schemas(stub: LangServer) -> None:
    stub.answer = lambda _: '{"name": "Ann", "age": 7}'
    schema = Person.model_json_schema()
    for form in (schema, json.dumps(schema), Person):
        run(gen("a", json_schema=form)).sync()
        assert json.loads(sampling(stub)["json_schema"]) == schema
    answer = gen("a", schema=Person)
    assert run(answer)[answer] == Person(name="Ann", age=7)
    assert run(gen("a")).value("a", Person).age == 7
    numbers = gen("b", schema=dict[str, Any])
    assert run(numbers)[numbers]["age"] == 7
    with pytest.raises(ValueError, match="char"):
        gen("a", json_schema="{")
    stub.answer = lambda _: '{"name": "An'
    state = run(answer)
    with pytest.raises(ValueError, match="ended by"):
        state[answer]


def test_t60_several_answers(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += user("Hi")
        s += assistant(gen("a", n=2))

    stub.answer = lambda _: ["one", "two"]
    for stream in (False, True):
        state = ask.run(stream=stream)
        assert state["a"] == ["one", "two"]
        assert state.messages()[-1]["content"] == "one"
        assert len(state.get_meta_info("a")) == 2
    assert state.usage().num_requests == 1


class Picture:
    """As PIL's images save themselves."""

    def save(self, target: io.BytesIO, format: str) -> None:
        assert format == "PNG"
        target.write(PNG)


def test_t61_images(stub: LangServer, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    encoded = base64.b64encode(PNG).decode()

    @function
    def ask(s: sgl.ProgramState, pictures: list[Any]) -> None:
        s += user("Look: " + image(pictures[0]))
        s += assistant(gen("a"))
        for picture in pictures[1:]:
            s += user(image(picture))
            s += assistant(gen("a"))

    forms = [path, str(path), f"file://{path}", PNG, Picture(), (Picture(), None), encoded]
    for form in [*forms, f"data:image/png;base64,{encoded}"]:
        state = ask([form])
        text, url = state.messages()[1]["content"]
        assert text == {"type": "text", "text": "Look: <image>"}
        assert url["image_url"]["url"] == f"data:image/png;base64,{encoded}"
        assert stub.payloads[-1]["image_data"] == encoded
    ask([PNG, b"\xff\xd8\xff"]).sync()
    assert stub.payloads[-1]["image_data"] == [encoded, base64.b64encode(b"\xff\xd8\xff").decode()]
    assert load_media(b"\xff\xd8\xff").mime_type == "image/jpeg"
    with pytest.raises(KeyError, match="No such file"):
        ask(["missing.png"])["a"]
    assert "A image" not in str(ask([3.5]).error())


def test_a_refused_image_is_told_in_the_servers_words(stub: LangServer) -> None:
    stub.answer = lambda _: (400, {"error": {"message": "This model takes no images."}})
    with pytest.raises(sgl.ProgramError, match="takes no images"):
        run(image(PNG) + gen("a"))["a"]


def test_t62_reasoning(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += user("Hi")
        s += assistant("So: " + sgl.separate_reasoning(gen("a"), model_type="qwen3") + gen("b"))

    stub.answer = lambda payload: "!" if "yes" in payload["text"] else "<think>hm</think>yes"
    state = ask()
    assert (state["a"], state["a_reasoning_content"]) == ("yes", "hm")
    state.sync()
    assert stub.texts[-1].endswith("So: yes")
    stub.answer = lambda payload: (
        ["<think>h</think>y", "z"] if payload["sampling_params"]["n"] == 2 else "!"
    )
    several = run(sgl.separate_reasoning(gen("a", n=2), model_type="qwen3"))
    assert several["a"] == ["y", "z"]
    assert several["a_reasoning_content"] == ["h", ""]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, {"error": {"message": "boom"}}), ["500", "boom"]),
        ((500, {"object": "error", "message": "flat boom"}), ["500", "flat boom"]),
        ((502, "<html>Bad gateway</html>"), ["502", "Bad gateway"]),
    ],
)
def test_t63_a_server_that_fails(stub: LangServer, answer: Any, words: list[str]) -> None:
    stub.answer = lambda _: answer
    for stream in (False, True):
        state = run_named(stream)
        with pytest.raises(KeyError) as raised:
            state["a"]
        told = str(raised.value)
        for word in [*words, "'a'", "named", "after 'x'", "test_values.py"]:
            assert word in told
        assert raised.value is state.error()
        assert isinstance(raised.value, sgl.ProgramError)
        assert isinstance(raised.value.__cause__, sgl.BackendError)
        assert raised.value.__cause__.status == answer[0]
        assert state.text() == "x"
        with pytest.raises(sgl.ProgramError, match=r"'b'.*'a'"):
            state["b"]


@function
def named(s: sgl.ProgramState) -> None:
    s += "x" + gen("a") + gen("b")


def run_named(stream: bool) -> sgl.ProgramState:
    return named.run(stream=stream)


def test_t63_nobody_listens(stub: LangServer, endpoint: sgl.RuntimeEndpoint) -> None:
    stub.close()
    endpoint.shutdown()
    with pytest.raises(sgl.ProgramError, match="Refused"):
        named()["a"]
    with pytest.raises(sgl.BackendError, match="Refused"):
        sgl.RuntimeEndpoint(stub.url)
    with pytest.raises(sgl.BackendError, match="URL"):
        sgl.RuntimeEndpoint("ftp://localhost")


def test_t64_a_conversation_goes_on(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += user("Hi")
        s += assistant(gen("a"))

    state = ask()
    state += user("More")
    state += assistant(gen("b"))
    assert state["b"] == " stub"
    assert len(state.messages()) == 5
    forks = state.fork(2)
    forks += "?" + gen("c")
    # Both have answered before requests are counted.
    assert [each["c"] for each in forks] == [" stub", " stub"]
    assert state.usage().num_requests == 4
    assert state.usage().total_tokens > state.usage().completion_tokens == 4
    stub.answer = lambda _: (500, {"error": {"message": "boom"}})
    state += gen("d")
    assert state.error() is not None
    with pytest.raises(sgl.ProgramError, match="boom"):
        state += "more"
    assert state["b"] == " stub"


def test_a_busy_server_is_asked_again(stub: LangServer) -> None:
    answers: list[Any] = [(503, {"error": {"message": "full"}}), ConnectionError, "at last"]

    def answer(_: dict[str, Any]) -> Any:
        found = answers.pop(0)
        if found is ConnectionError:
            raise ConnectionError
        return found

    stub.answer = answer
    assert run(gen("a"))["a"] == "at last"


def test_parameters_beyond_the_references(stub: LangServer) -> None:
    run(gen("a", repetition_penalty=1.5, sampling_seed=7, lora_path="x")).sync()
    assert sampling(stub)["repetition_penalty"] == 1.5
    assert sampling(stub)["sampling_seed"] == 7
    assert stub.payloads[-1]["lora_path"] == "x"
    with pytest.raises(TypeError):
        gen("a", unheard=1)  # type: ignore[call-overload]


def test_a_back_end_in_plain_functions() -> None:
    class Plain(sgl.BaseBackend):
        def generate(self, s: Any, sampling_params: Any) -> Any:
            return f"<{len(s.text_)}>", {}

        def generate_stream(self, s: Any, sampling_params: Any) -> Any:
            yield "a", {}
            yield "b", {}

    assert named.run(backend=Plain()).text() == "x<1><4>"
    state = named.run(backend=Plain(), stream=True)
    assert "".join(state.text_iter()) == "xabab"
    with pytest.raises(sgl.ProgramError, match="cannot generate"):
        named.run(backend=sgl.BaseBackend())["a"]


def test_a_turn_filled_by_one_call() -> None:
    class Filler(sgl.AsyncBackend):
        support_api_speculation = True

        async def async_fill_turn(self, s: Any, parts: Any) -> Any:
            assert s.text_.endswith("ASSISTANT:")
            return [(f"<{part.sampling_params.stops}>", {}) for part in parts if part.text is None]

    @function(num_api_spec_tokens=16)
    def ask(s: sgl.ProgramState) -> None:
        s += user("Hi")
        s += assistant("A: " + gen("a", stop="\n") + " B: " + gen("b", stop="."))

    with pytest.warns(UserWarning, match="ignored"):
        assert ask()["b"] == " stub"
    state = ask.run(backend=Filler())
    assert state.messages()[-1]["content"] == "A: <['\\n']> B: <['.']>"
    assert state["b"] == "<['.']>"
