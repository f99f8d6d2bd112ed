"""SGLang's fields in OpenAI's routes that need more than sampling: hidden states and sessions."""

import json
import math

import pytest

from tests.support.native import GREEDY, TEXT, generate, tokenize
from tests.support.server import ServerProcess, common_server, running_server

SHORT = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Where is the mill?"}]


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return running_server(
        "qwen3",
        *("--disable-radix-cache", "--enable-return-hidden-states"),
        *("--chunked-prefill-size", "16", "--random-seed", "5"),
    )


def post(server: ServerProcess, path: str, **body) -> dict:
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: ServerProcess, path: str, **body) -> list[dict]:
    answer = server.client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def refused(server: ServerProcess, path: str, **body) -> str:
    response = server.client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


def close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and math.dist(one, other) < 1e-2


# ---- hidden states ----


@pytest.mark.parametrize("which", [True, "last"])
def test_completions_give_the_last_row(server, which):
    params = {**GREEDY, "max_new_tokens": 6}
    body = {"text": TEXT, "sampling_params": params, "return_hidden_states": "last"}
    wanted = generate(server, **body)["meta_info"]["hidden_states"]
    asked = {"prompt": [TEXT, "The"], "return_hidden_states": which, **SHORT}
    choices = post(server, "/v1/completions", **asked)["choices"]
    assert close(choices[0]["hidden_states"], wanted)
    assert not close(choices[1]["hidden_states"], wanted)
    *texts, first, second = events(server, "/v1/completions", **asked)
    assert not any("hidden_states" in event["choices"][0] for event in texts)
    for event, index in ((first, 0), (second, 1)):
        (choice,) = event["choices"]
        assert (choice["index"], choice["text"], choice["finish_reason"]) == (index, "", None)
        assert close(choice["hidden_states"], choices[index]["hidden_states"])


def test_chat_gives_the_last_row(server):
    asked = {"messages": MESSAGES, "n": 2, "return_hidden_states": True, **SHORT}
    choices = post(server, "/v1/chat/completions", **asked)["choices"]
    assert len(choices[0]["hidden_states"]) == 64
    # Both are greedy, so they are the same answer.
    assert close(choices[0]["hidden_states"], choices[1]["hidden_states"])
    found = events(server, "/v1/chat/completions", **asked, stream_options={"include_usage": True})
    ends = [bool(event["choices"] and event["choices"][0]["finish_reason"]) for event in found]
    # Behind the ends of all choices, before the usage.
    assert ends == [*[False] * (len(found) - 5), True, True, False, False, False]
    for event, choice in zip(found[-3:-1], choices, strict=True):
        delta = event["choices"][0]["delta"]
        assert close(delta["hidden_states"], choice["hidden_states"])
    assert found[-1]["choices"] == []


def test_nobody_who_does_not_ask_gets_them(server):
    for which in (None, False):
        body = {"prompt": "The", "return_hidden_states": which, **SHORT}
        assert "hidden_states" not in post(server, "/v1/completions", **body)["choices"][0]
    plain = common_server()
    for path, body in (
        ("/v1/completions", {"prompt": "The"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        message = refused(plain, path, **body, return_hidden_states=True)
        assert "--enable-return-hidden-states" in message


# ---- sessions ----


@pytest.fixture
def session(server: ServerProcess):
    opened = server.client.post("/open_session", json={"capacity_of_str_len": 4000}).json()
    yield opened
    server.client.post("/close_session", json={"session_id": opened}).raise_for_status()


def test_completions_go_on_in_a_session(server, session):
    first = post(server, "/v1/completions", prompt=TEXT, session_params={"id": session}, **SHORT)
    follow = {"prompt": " And then", "session_params": {"id": session, "rid": first["id"]}}
    second = post(server, "/v1/completions", **follow, **SHORT)
    spoken = generate(server, text=TEXT, sampling_params={**GREEDY, "max_new_tokens": 6})
    prompt = [*tokenize(server, TEXT), *spoken["output_ids"], *tokenize(server, " And then")]
    whole = post(server, "/v1/completions", prompt=prompt, **SHORT)
    assert second["usage"]["prompt_tokens"] == len(prompt)
    assert second["choices"][0]["text"] == whole["choices"][0]["text"]
    # A stream, and from there with the native route.
    streamed = events(server, "/v1/completions", **follow, **SHORT)
    text = "".join(event["choices"][0]["text"] for event in streamed)
    assert text == whole["choices"][0]["text"]
    third = generate(
        server,
        text=".",
        session_params={"id": session, "rid": streamed[0]["id"]},
        sampling_params={**GREEDY, "max_new_tokens": 2},
    )
    assert third["meta_info"]["prompt_tokens"] == len(prompt) + 6 + len(tokenize(server, "."))


def test_chat_goes_on_in_a_session(server, session):
    body = {"messages": MESSAGES, **SHORT}
    alone = post(server, "/v1/chat/completions", **body)["usage"]["prompt_tokens"]
    first = post(server, "/v1/chat/completions", **body, session_params={"id": session})
    follow = {"id": session, "rid": first["id"]}
    second = post(server, "/v1/chat/completions", **body, session_params=follow)
    assert second["usage"]["prompt_tokens"] == 2 * alone + 6


def test_what_a_session_refuses(server, session):
    body = {"prompt": "The", **SHORT}
    nothing = {"id": None, "rid": None, "offset": None}
    assert post(server, "/v1/completions", **body, session_params=nothing)["choices"]
    for params, words in (
        ({"id": "unknown"}, "no open session"),
        ({"id": session, "rid": "unknown"}, "no request"),
    ):
        assert words in refused(server, "/v1/completions", **body, session_params=params)
    params = {"id": session}
    assert "echo" in refused(server, "/v1/completions", **body, echo=True, session_params=params)
    # One member that is refused takes the others back.
    several = {"prompt": ["The", TEXT * 20], "rid": ["one", "two"], "session_params": params}
    assert "context length" in refused(server, "/v1/completions", **several)
    for rid in ("one", "two"):
        gone = {"id": session, "rid": rid}
        assert "no request" in refused(server, "/v1/completions", **body, session_params=gone)


def test_best_of(server):
    def mean(choice: dict) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    asked = {"prompt": TEXT, "max_tokens": 8, "temperature": 1, "seed": 3, "logprobs": 0}
    every = post(server, "/v1/completions", **asked, n=6)["choices"]
    ranked = sorted(every, key=mean, reverse=True)
    best = post(server, "/v1/completions", **asked, n=2, best_of=6)["choices"]
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]
    assert [mean(choice) for choice in best] == pytest.approx([*map(mean, ranked[:2])], abs=1e-3)
