"""Programs, their turns and their requests against a stub server: checks T01 to T20."""

import ast
from pathlib import Path
from typing import Any

import pytest

import headrace as sgl
from headrace import assistant, function, gen, system, user
from headrace.lang.ir import SglGen, SglSeparateReasoning
from tests.support.lang_server import LangServer

pytestmark = pytest.mark.usefixtures("endpoint")

SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
PAYLOAD_FIELDS = {
    *("skip_special_tokens", "spaces_between_special_tokens", "max_new_tokens", "min_new_tokens"),
    *("n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "ignore_eos", "regex", "json_schema"),
}


@function
def chat(s: sgl.ProgramState, question: str = "Hi") -> None:
    s += system("Be brief.")
    s += user(question)
    s += assistant(gen("answer", max_tokens=5))


def test_t01_the_endpoint_asks_for_the_model_once(stub: LangServer) -> None:
    stub.requests.clear()
    sgl.RuntimeEndpoint(stub.url + "/", api_key="secret")
    # A second one asks for the model's own chat template.
    asked = [(r.method, r.path) for r in stub.requests]
    assert asked == [("GET", "/get_model_info"), ("GET", "/tokenizer_info")]
    headers = stub.requests[0].headers
    assert headers["content-type"].startswith("application/json")
    assert headers["authorization"] == "Bearer secret"
    sgl.RuntimeEndpoint(stub.url)
    assert stub.requests[2].headers["authorization"] is None


def test_t02_one_request_with_every_field(stub: LangServer) -> None:
    chat("Hi").sync()
    (payload,) = stub.payloads
    assert payload["text"] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert payload["sampling_params"].keys() == PAYLOAD_FIELDS
    assert payload["sampling_params"]["max_new_tokens"] == 5
    assert payload["sampling_params"]["regex"] is None
    assert payload.keys() == {"text", "sampling_params"}


def test_t03_text_and_messages(stub: LangServer) -> None:
    stub.answer = lambda _: "  Hello. "
    state = chat("Hi")
    assert state.text().endswith("  Hello. <|im_end|>\n")
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello. "},
    ]


def test_t04_the_default_system_prompt_comes_first(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += user("Hi")

    assert ask().messages()[0] == {"role": "system", "content": "You are a helpful assistant."}
    assert ask().text().startswith(SYSTEM)
    plain = sgl.RuntimeEndpoint(stub.url, chat_template_name="default")
    assert ask.run(backend=plain).messages() == [{"role": "user", "content": "Hi"}]


def test_t05_a_system_turn_of_ones_own_is_the_only_one() -> None:
    assert chat("Hi").text().count("<|im_start|>system") == 1


def test_t06_a_generation_overrides_the_run(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += "x" + gen("a", temperature=0)

    ask.run(temperature=0.5, top_k=3, max_new_tokens=3).sync()
    sampling = stub.payloads[0]["sampling_params"]
    assert (sampling["temperature"], sampling["top_k"], sampling["max_new_tokens"]) == (0, 3, 3)
    ask.run(max_tokens=9).sync()
    assert stub.payloads[1]["sampling_params"]["max_new_tokens"] == 9


@pytest.mark.parametrize("stop", ["\n", ["\n"], ("\n",)])
def test_t07_stops_are_the_users_and_the_templates(stub: LangServer, stop: Any) -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += gen("a", stop=stop) + gen("b", stop=stop)

    ask().sync()
    assert [p["sampling_params"]["stop"] for p in stub.payloads] == [["\n", "<|im_end|>"]] * 2
    assert list(stop) == ["\n"]


def test_t08_the_returned_value() -> None:
    @function
    def ask(s: sgl.ProgramState) -> Any:
        s += "x"
        return s

    state = ask()
    assert isinstance(state.ret_value, sgl.ProgramState)
    assert state.ret_value.text() == "x"


def test_t09_unknown_variables(stub: LangServer) -> None:
    stub.hold.clear()
    state = chat("Hi")
    assert "answer" not in state
    stub.hold.set()
    assert state["answer"] == " stub"
    assert "answer" in state
    with pytest.raises(KeyError, match="unheard"):
        state["unheard"]
    assert state.get_meta_info("unheard") is None
    assert state.get_meta_info("answer")["id"] == "stub"


def test_t10_wrong_functions_and_wrong_calls() -> None:
    def first(question: str) -> None: ...
    def none() -> None: ...

    with pytest.raises(TypeError, match="first must be named s"):
        function(first)
    with pytest.raises(TypeError, match="none must be named s"):
        function(none)
    with pytest.raises(TypeError):
        chat("Hi", "too", "many")


def test_a_method_is_a_program_too() -> None:
    class Asker:
        greeting = "Hello"

        @function
        def ask(self, s: sgl.ProgramState, name: str) -> None:
            s += f"{self.greeting} {name}"

    assert Asker().ask("Ann").text() == "Hello Ann"


def test_t11_the_decorator_keeps_the_name() -> None:
    @function(num_api_spec_tokens=3)
    def ask(s: sgl.ProgramState) -> None:
        """Ask."""

    @function()
    def other(s: sgl.ProgramState) -> None: ...

    assert (ask.__name__, ask.__doc__, ask.num_api_spec_tokens) == ("ask", "Ask.", 3)
    assert other.__name__ == "other"


def test_t12_a_parameter_named_like_an_option_is_the_functions(stub: LangServer) -> None:
    @function
    def ask(s: sgl.ProgramState, n: int, temperature: str) -> None:
        s += f"{n} {temperature}" + gen("a")

    assert ask.run(n=3, temperature="hot").text() == "3 hot stub"
    assert stub.payloads[0]["sampling_params"]["n"] == 1


def test_t13_what_cannot_be_appended_is_refused_on_its_line() -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        with pytest.raises(ValueError, match="None"):
            s += None  # type: ignore[arg-type]
        for wrong in (3, 1.5, b"x", ["x"], other):
            with pytest.raises(TypeError):
                s += wrong  # type: ignore[arg-type]
        s += "fine"

    other = chat("Hi")
    assert ask().text() == "fine"
    with pytest.raises(TypeError, match=r"str\(\)"):
        gen("a") + 3  # type: ignore[operator]
    with pytest.raises(TypeError):
        gen("a") + None  # type: ignore[operator]


def test_t14_both_spellings_append_once() -> None:
    @function
    def one(s: sgl.ProgramState) -> None:
        s += s.system("x")

    @function
    def two(s: sgl.ProgramState) -> None:
        s += system("x")

    @function
    def three(s: sgl.ProgramState) -> None:
        s.system("x")

    assert one().text() == two().text() == three().text() == "<|im_start|>system\nx<|im_end|>\n"


def test_t15_three_spellings_of_a_turn() -> None:
    @function
    def markers(s: sgl.ProgramState) -> None:
        s += sgl.user_begin()
        s += "a" + gen("x")
        s += sgl.user_end()

    @function
    def block(s: sgl.ProgramState) -> None:
        with s.user():
            s += "a"
            s += gen("x")

    @function
    def call(s: sgl.ProgramState) -> None:
        s += user("a" + gen("x"))

    states = [program() for program in (markers, block, call)]
    assert len({state.text() for state in states}) == 1
    assert states[0].messages() == states[1].messages() == states[2].messages()


def test_t16_turns_that_do_not_fit() -> None:
    @function
    def nested(s: sgl.ProgramState) -> None:
        s += "before"
        s += sgl.system_begin()
        s += sgl.user_begin()

    @function
    def unopened(s: sgl.ProgramState) -> None:
        s += "before"
        s += sgl.user_end()

    @function
    def unclosed(s: sgl.ProgramState) -> None:
        s += system("x")
        s += sgl.user_begin() + "open"

    assert "inside the turn of 'system'" in str(nested().error())
    assert nested().text() == "before<|im_start|>system\n"
    assert "no turn is open" in str(unopened().error())
    assert unopened().text() == "before"
    state = unclosed()
    assert state.text().endswith("<|im_start|>user\nopen")
    assert [message["role"] for message in state.messages()] == ["system"]


def test_t17_an_exception_closes_what_is_open() -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        try:
            with s.user():
                s += "a"
                raise LookupError
        except LookupError:
            s += user("b")
        try:
            with s.var_scope("v"):
                s += "c"
                raise LookupError
        except LookupError:
            assert s["v"] == "c"

    state = ask()
    assert state.error() is None
    assert [message["content"] for message in state.messages()[1:]] == ["a", "b"]


def test_t18_a_scope_is_the_text_inside() -> None:
    @function
    def ask(s: sgl.ProgramState) -> str:
        s += "before "
        with s.var_scope("v"):
            s += "in" + gen("x")
            s += " side"
        return str(s["v"])

    state = ask()
    assert state.ret_value == state["v"] == "in stub side"


def test_t19_a_program_inside_a_program(stub: LangServer) -> None:
    @function
    def inner(s: sgl.ProgramState) -> None:
        s += "inner" + gen("x", temperature=0.25)

    @function
    def outer(s: sgl.ProgramState) -> str:
        state = inner()
        s += "outer" + state["x"]
        return state.text()

    state = outer.run(max_new_tokens=3)
    assert (state.text(), state.ret_value) == ("outer stub", "inner stub")
    assert stub.payloads[0]["sampling_params"]["max_new_tokens"] == 128


def test_t20_a_branch_that_is_not_taken(stub: LangServer) -> None:
    @function
    def tool_use(s: sgl.ProgramState) -> None:
        s += "I need " + gen("tool")
        if s["tool"] == "calculator":
            s += ": " + gen("expression")
        else:
            s += ": " + gen("word")

    stub.answer = lambda payload: "1 + 1" if ":" in payload["text"] else "calculator"
    state = tool_use()
    assert state["expression"] == "1 + 1"
    with pytest.raises(KeyError, match="word"):
        state["word"]


def test_reasoning_marks_as_programs_look_at_them() -> None:
    marked = sgl.separate_reasoning(gen("a"), model_type="deepseek-r1")
    expression, marker = marked.expr_list
    assert isinstance(expression, SglGen)
    assert isinstance(marker, SglSeparateReasoning)
    assert repr(marker) == "SeparateReasoning(model_type=deepseek-r1, name=a)"
    with pytest.raises(ValueError, match="name"):
        sgl.separate_reasoning(gen(), model_type="qwen3")
    with pytest.raises(ValueError, match="qwen3"):
        sgl.separate_reasoning(gen("a"), model_type="unheard")


def test_no_back_end() -> None:
    sgl.set_default_backend(None)
    with pytest.raises(RuntimeError, match="set_default_backend"):
        chat("Hi")
    assert sgl.flush_cache() is False
    assert sgl.get_server_info() is None


def test_module_functions(stub: LangServer) -> None:
    assert sgl.flush_cache() is True
    assert sgl.get_server_info() == {"version": "stub"}


def test_the_files_of_the_language_import_no_heavy_library() -> None:
    heavy = {"torch", "numpy", "IPython", "aiohttp", "httpx", "pydantic", "tqdm", "requests"}
    for path in Path(sgl.__file__).parent.joinpath("lang").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & heavy, path
