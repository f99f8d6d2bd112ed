"""Programs of the frontend language against a server with the demo model."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import headrace as sgl
from headrace import assistant, function, gen, select, user
from headrace.demo import MODEL_PATH
from tests.support.server import ServerProcess, demo_server
from tests.support.waiting import until

CAPITAL = "The capital of France is"
METHODS = [
    sgl.token_length_normalized,
    sgl.greedy_token_selection,
    sgl.unconditional_likelihood_normalized,
]


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return demo_server()


@pytest.fixture(scope="module", autouse=True)
def endpoint(server: ServerProcess) -> Iterator[sgl.RuntimeEndpoint]:
    endpoint = sgl.RuntimeEndpoint(server.url)
    sgl.set_default_backend(endpoint)
    yield endpoint
    sgl.set_default_backend(None)
    endpoint.shutdown()


@function
def complete(s: sgl.ProgramState, prompt: str, **options: Any) -> None:
    s += prompt + gen("a", temperature=0, **options)


def generate(server: ServerProcess, text: str, **sampling: Any) -> dict[str, Any]:
    body = {"text": text, "sampling_params": {"temperature": 0, **sampling}}
    found: dict[str, Any] = server.client.post("/generate", json=body).json()
    return found


def num_running(server: ServerProcess) -> int:
    loads = server.client.get("/get_load").json()
    return sum(load["num_reqs"] for load in loads)


def test_a_program_gives_what_the_server_gives(server: ServerProcess) -> None:
    state = complete(CAPITAL, max_tokens=12)
    expected = generate(server, CAPITAL, max_new_tokens=12)
    assert state["a"] == expected["text"]
    assert state.get_meta_info("a")["completion_tokens"] == 12
    usage = state.usage()
    assert usage.prompt_tokens == expected["meta_info"]["prompt_tokens"]
    assert usage.completion_tokens == 12


@pytest.mark.parametrize("prompt", ["日本の首都は", "Smile \U0001f600\U0001f600", CAPITAL])
def test_t38_streamed_is_whole(prompt: str) -> None:
    whole = complete(prompt, max_tokens=24, ignore_eos=True)["a"]
    state = complete.run(prompt, max_tokens=24, ignore_eos=True, stream=True)
    pieces = list(state.text_iter("a"))
    assert "".join(pieces) == whole


def test_t39_a_stop_string_never_shows() -> None:
    whole = complete(CAPITAL, max_tokens=24)["a"]
    stop = whole[8:12]
    cut = whole[: whole.index(stop)]
    assert complete(CAPITAL, max_tokens=24, stop=stop)["a"] == cut
    streamed = complete.run(CAPITAL, max_tokens=24, stop=stop, stream=True)
    pieces = list(streamed.text_iter("a"))
    assert "".join(pieces) == cut


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("space", ["", " "])
def test_t55_select_knows_the_capital(server: ServerProcess, method: Any, space: str) -> None:
    cities = ["London", "Paris", "Berlin"]
    choices = cities if space else [f" {city}" for city in cities]

    @function
    def ask(s: sgl.ProgramState) -> None:
        s += CAPITAL + space + select("city", choices, choices_method=method)

    state = ask()
    assert state["city"].strip() == "Paris"
    assert state.text() == CAPITAL + " Paris"


def test_t55_the_scores_are_the_models(server: ServerProcess) -> None:
    choices = [" London", " Paris"]

    @function
    def ask(s: sgl.ProgramState) -> None:
        s += CAPITAL + select("city", choices)

    info = ask().get_meta_info("city")
    for choice, score in zip(choices, info["normalized_prompt_logprobs"], strict=True):
        body = {
            "text": CAPITAL + choice,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        entries = server.client.post("/generate", json=body).json()["meta_info"]
        prompt_len = generate(server, CAPITAL, max_new_tokens=0)["meta_info"]["prompt_tokens"]
        own = [entry[0] for entry in entries["input_token_logprobs"][prompt_len:]]
        assert score == pytest.approx(sum(own) / len(own), abs=0.05)


@pytest.mark.parametrize("dtype", [int, float, bool, str])
def test_t58_typed_values(dtype: type[Any]) -> None:
    answer = gen("a", dtype=dtype, max_tokens=16, temperature=0)

    @function
    def ask(s: sgl.ProgramState) -> None:
        s += "The answer: " + answer

    state = ask()
    assert state.error() is None
    if state.get_meta_info("a")["finish_reason"]["type"] == "stop":
        assert type(state[answer]) is dtype


def test_t57_a_regex_holds() -> None:
    octet = r"(25[0-5]|2[0-4]\d|[01]?\d\d?)"
    state = complete("The address is ", regex=rf"({octet}.){{3}}{octet}", max_tokens=32)
    assert re.fullmatch(rf"({octet}.){{3}}{octet}", state["a"])


def test_t60_several_answers() -> None:
    @function
    def ask(s: sgl.ProgramState) -> None:
        s += CAPITAL + gen("a", n=2, temperature=1.0, max_tokens=8)

    state = ask()
    assert len(state["a"]) == 2
    assert state.text() == CAPITAL + state["a"][0]


def test_the_second_child_finds_its_prefix_cached(server: ServerProcess) -> None:
    @function
    def ask(s: sgl.ProgramState) -> Any:
        s += "Here are some facts about the sea, told one after the other. " * 5
        forks = s.fork(2)
        forks += lambda i: f"{i}:" + gen("a", max_tokens=2, temperature=0)
        return forks

    children = ask().ret_value
    cached = [child.get_meta_info("a")["cached_tokens"] for child in children]
    assert cached[1] > 20


def test_a_batch_is_what_single_runs_are() -> None:
    prompts = [f"{CAPITAL} number {i}" for i in range(40)]
    single = [complete(prompt, max_tokens=4)["a"] for prompt in prompts]
    elements = [{"prompt": prompt, "max_tokens": 4} for prompt in prompts]

    @function
    def limited(s: sgl.ProgramState, prompt: str, max_tokens: int) -> None:
        s += prompt + gen("a", temperature=0, max_tokens=max_tokens)

    states = limited.run_batch(elements)
    assert [state["a"] for state in states] == single


def test_t42_leaving_a_stream_aborts_its_request(server: ServerProcess) -> None:
    state = complete.run(CAPITAL, max_tokens=1500, ignore_eos=True, stream=True)
    for count, _ in enumerate(state.text_iter("a")):
        if count == 2:
            break
    until(lambda: num_running(server) == 0, 30)
    with pytest.raises(sgl.ProgramCancelled):
        state["a"]


async def test_async_programs_read_while_they_run() -> None:
    @function
    async def agent(s: sgl.AsyncProgramState, start: str) -> int:
        s += user(start)
        for turn in range(3):
            s += assistant(gen(f"step{turn}", max_tokens=4, temperature=0))
            s += user(f"You said: {await s[f'step{turn}']}")
        return len(await s.messages())

    states = await asyncio.gather(*(agent.arun(f"Go {i}") for i in range(20)))
    assert {state.ret_value for state in states} == {7}


def test_a_text_model_refuses_images_in_clear_words() -> None:
    @function
    def look(s: sgl.ProgramState) -> None:
        s += user(sgl.image(b"\x89PNG\r\n\x1a\n") + "What is it?")
        s += assistant(gen("a"))

    with pytest.raises(sgl.ProgramError, match="image_data: this model takes text only"):
        look()["a"]


def test_bad_requests_are_told_in_the_servers_words() -> None:
    state = complete(CAPITAL, max_tokens=5000)
    with pytest.raises(sgl.ProgramError, match=r"'a'.*400"):
        state["a"]
    with pytest.raises(sgl.ProgramError, match=r"grammar|regex|look"):
        complete("x", regex="(?=a)b")["a"]


def test_module_functions(server: ServerProcess) -> None:
    info = sgl.get_server_info()
    assert info is not None
    assert info["model_path"] == str(MODEL_PATH)
    until(lambda: num_running(server) == 0)
    assert sgl.flush_cache() is True
    with pytest.raises(httpx.HTTPStatusError):
        server.client.get("/no-such-route").raise_for_status()


def test_the_language_needs_no_torch(server: ServerProcess) -> None:
    code = f"""
import sys
import headrace as sgl
sgl.set_default_backend(sgl.RuntimeEndpoint({server.url!r}))
@sgl.function
def ask(s):
    s += "x" + sgl.gen("a", max_tokens=2)
ask()["a"]
heavy = {{"torch", "numpy", "IPython", "aiohttp", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ},
        check=False,
    )
    assert done.returncode == 0, done.stderr
