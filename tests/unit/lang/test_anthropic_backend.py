"""The Anthropic back end against a server that speaks the Messages API."""

import base64
import json
import warnings
from typing import Any

import pytest

from headrace import Anthropic, assistant, function, gen, image, select, system, user
from headrace.lang.program_errors import BackendError, ProgramError
from tests.support.fake_http import Asked, serve, sse

PATH = "/v1/messages"
USAGE = {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 3}
PIXEL = b"\x89PNG\r\n\x1a\n" + b"x" * 40


def answer(text: str = "Paris.", **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    head = {"id": "msg-1", "type": "message", "role": "assistant", "model": "c"}
    return {**head, "content": content, "stop_reason": "end_turn", "usage": USAGE, **more}


def tool_answer(arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "t", "name": "answer", "input": arguments}
    return answer(content=[call], stop_reason="tool_use")


def claude(server: Any, **options: Any) -> Anthropic:
    return Anthropic("c", base_url=server.url, api_key="k", **{"max_retries": 0, **options})


@function
def ask(s, question, **options):
    s += system("Be brief.")
    s += user(question)
    s += assistant(gen("answer", **options))


def test_a_request_as_the_messages_api_wants_it() -> None:
    with serve({PATH: answer()}) as server:
        state = ask.run("France?", backend=claude(server), max_new_tokens=7, stop="###")
        assert state["answer"] == "Paris."
        (asked,) = server.requests
    # The system turn is the API's parameter, and stays in the conversation.
    assert [message["role"] for message in state.messages()] == ["system", "user", "assistant"]
    assert asked.body == {
        "model": "c",
        "max_tokens": 7,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "France?"}],
        "stop_sequences": ["###"],
    }
    assert asked.headers["x-api-key"] == "k"
    assert asked.headers["anthropic-version"] == "2023-06-01"
    meta = state.get_meta_info("answer")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (9, 4, 3)
    assert meta["finish_reason"] == {"type": "stop"}
    assert state.text().endswith("\n\nHuman: France?\n\nAssistant:Paris.")


def test_sampling_and_a_turn_that_has_begun() -> None:
    @function
    def begun(s):
        s += user("?")
        s += assistant("The capital is " + gen("answer", temperature=0.2, top_k=5, top_p=0.9))

    with serve({PATH: answer("Paris")}) as server:
        state = begun.run(backend=claude(server))
        assert state.messages()[-1]["content"] == "The capital is Paris"
        (body,) = server.bodies(PATH)
    # The API refuses white space at the end.
    assert body["messages"][-1] == {"role": "assistant", "content": "The capital is"}
    assert (body["temperature"], body["top_k"], body["top_p"]) == (0.2, 5, 0.9)


EVENTS = [
    {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 5}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "Pa\u2028"},
    },
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "ris"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens"},
        "usage": {"output_tokens": 2},
    },
    {"type": "message_stop"},
]


def test_t38_a_stream_cut_anywhere() -> None:
    # Names of events beside them, and pieces that end inside of characters.
    raw = "".join(
        f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"
        for event in EVENTS
    ).encode()
    pieces = [raw[start : start + 7] for start in range(0, len(raw), 7)]
    with serve({PATH: pieces}) as server:
        state = ask.run("?", backend=claude(server), stream=True)
        assert "".join(state.text_iter("answer")) == "Pa\u2028ris"
        meta = state.get_meta_info("answer")
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 2)
        assert meta["finish_reason"] == {"type": "length"}
        assert server.bodies(PATH)[0]["stream"] is True


def test_t41_an_error_inside_a_stream() -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    with serve({PATH: lambda _: iter(sse(*EVENTS[:4], error))}) as server:
        state = ask.run("?", backend=claude(server), stream=True)
        pieces = []
        with pytest.raises(ProgramError, match="Overloaded"):
            pieces += state.text_iter("answer")
    assert state.error() is not None


def test_leaving_a_stream_ends_the_request() -> None:
    def endless(_: Asked):
        yield from sse(*EVENTS[:2])
        while not server.left.wait(0.01):
            delta = {"type": "text_delta", "text": "x" * 1000}
            yield from sse({"type": "content_block_delta", "index": 0, "delta": delta})

    with serve({PATH: endless}) as server:
        pieces = iter(ask.run("?", backend=claude(server), stream=True).text_iter("answer"))
        assert next(pieces)
        pieces.close()
        assert server.left.wait(20)


def test_a_schema_is_the_arguments_of_a_tool() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    with serve({PATH: tool_answer({"name": "É"})}) as server:
        state = ask.run("?", backend=claude(server), json_schema=schema)
        assert json.loads(state["answer"]) == {"name": "É"}
        (body,) = server.bodies(PATH)
    assert body["tools"][0]["input_schema"] == schema
    assert body["tool_choice"] == {"type": "tool", "name": "answer"}


def test_select_is_a_tool_whose_argument_is_a_choice() -> None:
    @function
    def pick(s):
        s += user("2 * 2?")
        s += assistant(select("tool", ["calculator", "search"]))

    with serve({PATH: tool_answer({"choice": "search"})}) as server:
        assert pick.run(backend=claude(server))["tool"] == "search"
        (body,) = server.bodies(PATH)
    schema = body["tools"][0]["input_schema"]
    assert schema["properties"]["choice"]["enum"] == ["calculator", "search"]
    # One turn of the user: the question goes with it.
    assert [message["role"] for message in body["messages"]] == ["user"]


def test_pictures_are_sent_as_the_api_wants_them() -> None:
    @function
    def look(s):
        s += user(image(PIXEL) + "What is it?")
        s += assistant(gen("answer"))

    with serve({PATH: answer("A dot.")}) as server:
        assert look.run(backend=claude(server))["answer"] == "A dot."
        (body,) = server.bodies(PATH)
    (text, picture) = body["messages"][0]["content"]
    assert text["type"] == "text"
    data = base64.b64encode(PIXEL).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    assert picture == {"type": "image", "source": source}


def test_a_busy_api_is_asked_again() -> None:
    answers: list[Any] = [(529, {"type": "error", "error": {"message": "Overloaded"}}), answer()]
    with serve({PATH: lambda _: answers.pop(0)}) as server:
        assert ask.run("?", backend=claude(server, max_retries=1))["answer"] == "Paris."
        assert len(server.requests) == 2


def test_t63_a_refusal_carries_the_servers_words() -> None:
    error = {"type": "error", "error": {"type": "not_found_error", "message": "model: c"}}
    with serve({PATH: (404, error)}) as server:
        state = ask.run("?", backend=claude(server, max_retries=3))
        with pytest.raises(ProgramError, match="404: model: c"):
            _ = state["answer"]
        assert isinstance(state.error().__cause__, BackendError)
        assert len(server.requests) == 1
    state = ask.run("?", backend=Anthropic("c", base_url=server.url, api_key="k", max_retries=0))
    with pytest.raises(ProgramError, match="ConnectError"):
        _ = state["answer"]


def test_what_the_api_cannot_do_is_said_once() -> None:
    with serve({PATH: answer()}) as server:
        backend = claude(server)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                ask.run("?", backend=backend, regex="a+", stop="\n").sync()
        assert server.bodies(PATH)[0]["stop_sequences"] == []
    words = sorted(str(each.message) for each in caught if each.category is UserWarning)
    assert len(words) == 2
    assert "stop strings of white space" in words[1]
    assert "does not support regex" in words[0]


def test_a_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(ValueError, match="ANTHROPIC_API_KEY"):
        Anthropic("c")
