"""The OpenAI back end against a server that speaks OpenAI's wire format."""

import json
import warnings
from typing import Any

import pytest

from headrace import OpenAI, assistant, function, gen, select, system, user
from headrace.lang.choices import (
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from headrace.lang.program_errors import BackendError, ProgramError
from tests.support.fake_http import Asked, serve, sse

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 3,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def chat_answer(*texts: str, finish: str = "stop") -> dict[str, Any]:
    return {
        "id": "chat-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "usage": USAGE,
        "choices": [
            {
                "index": index,
                "finish_reason": finish,
                "message": {"role": "assistant", "content": text},
            }
            for index, text in enumerate(texts)
        ],
    }


def completion(*texts: str, logprobs: Any = None) -> dict[str, Any]:
    choices = [
        {"index": i, "text": text, "finish_reason": "stop", "logprobs": logprobs}
        for i, text in enumerate(texts)
    ]
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    return {**head, "usage": USAGE, "choices": choices}


def chat(server: Any, **options: Any) -> OpenAI:
    return OpenAI("m", base_url=f"{server.url}/v1", api_key="k", max_retries=0, **options)


@function
def ask(s, question, **options):
    s += system("Be brief.")
    s += user(question)
    s += assistant(gen("answer", **options))


def test_a_chat_request_has_the_messages_and_what_was_asked_for() -> None:
    with serve({CHAT: chat_answer("Paris.")}) as server:
        backend = chat(server)
        state = ask.run("France?", backend=backend, temperature=0.5, max_new_tokens=7, stop="\n")
        assert state["answer"] == "Paris."
        assert state.messages()[-1] == {"role": "assistant", "content": "Paris."}
        (body,) = server.bodies(CHAT)
        assert server.requests[0].headers["authorization"] == "Bearer k"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "France?"},
    ]
    assert (body["model"], body["temperature"], body["stop"]) == ("m", 0.5, ["\n"])
    assert body["max_tokens"] == 7
    assert "max_completion_tokens" not in body
    meta = state.get_meta_info("answer")
    assert meta["finish_reason"] == {"type": "stop"}
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (9, 4, 3)
    usage = backend.token_usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 3)
    usage.reset()
    assert (usage.prompt_tokens, usage.completion_tokens) == (0, 0)
    assert state.usage().cached_tokens == 4


@pytest.mark.parametrize("model", ["o3-mini", "o1", "gpt-5"])
def test_reasoning_models_get_the_newer_limit(model: str) -> None:
    with serve({CHAT: chat_answer("x")}) as server:
        backend = OpenAI(model, base_url=f"{server.url}/v1", api_key="k")
        assert ask.run("?", backend=backend, max_new_tokens=7)["answer"] == "x"
        (body,) = server.bodies(CHAT)
    assert body["max_completion_tokens"] == 7
    assert "max_tokens" not in body


def test_a_stream_comes_in_pieces_and_leaving_it_ends_the_request() -> None:
    def chunk(delta: dict[str, Any], finish: str | None = None, usage: Any = None) -> Any:
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        choices = [] if usage else [{"index": 0, "delta": delta, "finish_reason": finish}]
        return {**head, "choices": choices, "usage": usage}

    events = [chunk({"content": "Pa\u2028"}), chunk({"content": "ris"}), chunk({}, "length")]
    events = [chunk({"role": "assistant"}), *events, chunk({}, usage=USAGE), "[DONE]"]

    def endless(_: Asked):
        while not server.left.wait(0.01):
            yield from sse(chunk({"content": "x" * 1000}))

    with serve({CHAT: lambda _: iter(sse(*events))}) as server:
        backend = chat(server)
        state = ask.run("?", backend=backend, stream=True)
        assert "".join(state.text_iter("answer")) == "Pa\u2028ris"
        assert state.get_meta_info("answer")["finish_reason"] == {"type": "length"}
        assert backend.token_usage.completion_tokens == 3
        (body,) = server.bodies(CHAT)
        assert body["stream"]
        assert body["stream_options"] == {"include_usage": True}
    with serve({CHAT: endless}) as server:
        pieces = iter(ask.run("?", backend=chat(server), stream=True).text_iter("answer"))
        assert next(pieces)
        pieces.close()
        assert server.left.wait(20)


def test_several_answers_are_a_list() -> None:
    with serve({CHAT: chat_answer("a", "b")}) as server:
        state = ask.run("?", backend=chat(server), n=2)
        assert state["answer"] == ["a", "b"]
        assert state.messages()[-1]["content"] == "a"
        assert server.bodies(CHAT)[0]["n"] == 2


def test_a_schema_becomes_structured_output() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    with serve({CHAT: chat_answer("{}")}) as server:
        assert ask.run("?", backend=chat(server), json_schema=schema)["answer"] == "{}"
        (body,) = server.bodies(CHAT)
    wanted = {"name": "answer", "schema": schema, "strict": True}
    assert body["response_format"] == {"type": "json_schema", "json_schema": wanted}


def test_select_on_a_chat_model_asks_for_one_of_the_choices() -> None:
    @function
    def pick(s):
        s += user("2 * 2?")
        s += assistant("I need a " + select("tool", ["calculator", "search", "search"]) + ".")

    with serve({CHAT: chat_answer('{"choice": "calculator"}')}) as server:
        state = pick.run(backend=chat(server))
        assert state["tool"] == "calculator"
        assert state.messages()[-1]["content"] == "I need a calculator."
        (body,) = server.bodies(CHAT)
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["choice"]["enum"] == ["calculator", "search"]
    assert body["messages"][-1]["role"] == "user"
    assert "I need a " in body["messages"][-1]["content"]
    assert body["temperature"] == 0
    with serve({CHAT: chat_answer("something else")}) as server:
        state = pick.run(backend=chat(server))
        with pytest.raises(ProgramError, match="chose none of"):
            _ = state["tool"]


def test_what_the_api_cannot_do_is_said_once() -> None:
    with serve({CHAT: chat_answer("x")}) as server:
        backend = chat(server)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                assert ask.run("?", backend=backend, top_k=3, regex="a+")["answer"] == "x"
    words = [str(each.message) for each in caught if each.category is UserWarning]
    assert words == ["OpenAI does not support top_k, regex; the request omits it."]


def test_a_generation_inside_an_answer_is_refused_with_advice() -> None:
    @function
    def inside(s):
        s += user("?")
        s += assistant("The answer is " + gen("answer"))

    @function
    def outside(s):
        s += "Q: A:" + gen("answer")

    with serve({CHAT: chat_answer("x")}) as server:
        for program, words in ((inside, "num_api_spec_tokens"), (outside, "assistant")):
            state = program.run(backend=chat(server))
            with pytest.raises(ProgramError, match=words):
                _ = state["answer"]
        assert not server.requests


def test_t63_a_refusal_carries_the_servers_words() -> None:
    error = {"error": {"message": "no such model: m", "type": "invalid_request_error"}}
    with serve({CHAT: (404, error)}) as server:
        state = ask.run("?", backend=chat(server))
        with pytest.raises(ProgramError, match=r"'answer'.*404: no such model: m"):
            _ = state["answer"]
        assert isinstance(state.error().__cause__, BackendError)
        assert state.error().__cause__.status == 404


def test_a_turn_that_mixes_text_and_generations_is_one_request() -> None:
    @function(num_api_spec_tokens=64)
    def character(s):
        s += user("Describe him.")
        s += assistant("Name:" + gen("name", stop="\n") + "\nJob:" + gen("job", stop="\n"))

    answers = [chat_answer("I cannot."), chat_answer("Name: Harry\nJob: wizard\nAge: 17")]
    with serve({CHAT: lambda _: answers.pop(0)}) as server:
        state = character.run(backend=chat(server))
        assert (state["name"], state["job"]) == (" Harry", " wizard")
        assert state.messages()[-1]["content"] == "Name: Harry\nJob: wizard"
        assert [body["max_tokens"] for body in server.bodies(CHAT)] == [64, 64]
    with serve({CHAT: chat_answer("I cannot.")}) as server:
        state = character.run(backend=chat(server))
        with pytest.raises(ProgramError, match=r"3 tries.*I cannot"):
            _ = state["name"]
        assert len(server.requests) == 3


# ---- completions ----


@function
def complete(s, **options):
    s += "Q: 2 * 2? A:" + gen("answer", **options)


def text_model(server: Any) -> OpenAI:
    return chat(server, is_chat_model=False)


def test_a_completion_model_gets_the_text() -> None:
    with serve({COMPLETIONS: completion(" 4")}) as server:
        state = complete.run(backend=text_model(server), max_new_tokens=3)
        assert state.text() == "Q: 2 * 2? A: 4"
        (body,) = server.bodies(COMPLETIONS)
    assert (body["prompt"], body["max_tokens"]) == ("Q: 2 * 2? A:", 3)


def test_a_string_is_opened_and_closed() -> None:
    with serve({COMPLETIONS: completion("four")}) as server:
        state = complete.run(backend=text_model(server), dtype=str)
        assert state["answer"] == '"four"'
        (body,) = server.bodies(COMPLETIONS)
    assert body["prompt"].endswith('A:"')
    assert '"' in body["stop"]


@pytest.mark.parametrize(
    ("method", "best"),
    [(token_length_normalized, " no"), (unconditional_likelihood_normalized, " yes")],
)
def test_select_on_a_completion_model_scores_the_choices(method: Any, best: str) -> None:
    scores = {"ok? no": [-0.5, -0.1], "ok? yes": [-0.5, -0.2], " no": [-0.1], " yes": [-3.0]}

    def answer(asked: Asked) -> Any:
        choices = []
        for index, text in enumerate(asked.body["prompt"]):
            tokens = ["ok?", text[3:]] if text.startswith("ok?") else [text]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [
                    None if i == 0 and len(tokens) > 1 else score
                    for i, score in enumerate(scores[text])
                ],
                "text_offset": [0, 3][: len(tokens)],
                "top_logprobs": None,
            }
            choices.append(
                {"index": index, "text": text, "finish_reason": "length", "logprobs": logprobs}
            )
        return {**completion(), "choices": choices}

    @function
    def decide(s):
        s += "ok?" + select("answer", [" no", " yes"], choices_method=method)

    with serve({COMPLETIONS: answer}) as server:
        state = decide.run(backend=text_model(server))
        assert state["answer"] == best
        bodies = server.bodies(COMPLETIONS)
    assert (bodies[0]["echo"], bodies[0]["max_tokens"], bodies[0]["logprobs"]) == (True, 0, 0)
    meta = state.get_meta_info("answer")
    assert meta["normalized_prompt_logprobs"] == [-0.1, -0.2]


def test_a_missing_package_is_named(tmp_path) -> None:
    import subprocess
    import sys

    (tmp_path / "openai.py").write_text("raise ModuleNotFoundError('none', name='openai')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import headrace\n"
        "try: headrace.OpenAI('m')\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "pip install openai" in done.stdout


def test_the_wire_is_json() -> None:
    # Characters outside of ASCII arrive as they are.
    with serve({CHAT: chat_answer("日本")}) as server:
        assert ask.run("首都?", backend=chat(server))["answer"] == "日本"
        assert json.dumps(server.bodies(CHAT)[0]["messages"][1]["content"]) == json.dumps("首都?")
