"""`Runtime`: a server that a program starts for itself; one for the file."""

import asyncio
import gc
import json
from collections.abc import Iterator

import pytest

import headrace
from headrace import Runtime, assistant, function, gen, select, user
from headrace.demo import MODEL_PATH
from headrace.lang.program_errors import BackendError
from headrace.test import test_programs
from tests.support.processes import alive
from tests.support.waiting import until

KEY = "a-key of 'some' length"


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    # As of `set_default_backend(Runtime(...))`, which keeps the endpoint alone.
    endpoint = Runtime(
        model_path=str(MODEL_PATH), max_total_tokens=4096, port=31000, api_key=KEY, tp=1
    ).endpoint
    gc.collect()
    with endpoint.runtime as found:
        yield found
        assert alive(found.pid)
        found.shutdown()
        until(lambda: not alive(found.pid))


@function
def capital(s, country):
    s += user(f"What is the capital of {country}?")
    s += assistant(gen("answer", max_tokens=12, temperature=0))


def test_it_stands_for_its_endpoint(runtime: Runtime) -> None:
    state = capital.run("France", backend=runtime)
    assert state["answer"]
    # Markup of the model's own template, not of a table.
    assert runtime.endpoint.get_chat_template().role_prefix_and_suffix["assistant"][0] == (
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert headrace.flush_cache(runtime) is True
    assert 31000 <= runtime.server_args.port < 40000
    assert runtime.url.endswith(str(runtime.server_args.port))


def test_t68_its_own_calls_answer_as_the_server_does(runtime: Runtime) -> None:
    sampling = {"max_new_tokens": 8, "temperature": 0}
    text = runtime.generate("The capital of France is", sampling, return_logprob=True)
    assert isinstance(text, str)
    answer = json.loads(text)
    assert len(answer["meta_info"]["output_token_logprobs"]) == 8
    both = json.loads(runtime.generate(["The capital of France is"] * 2, sampling))
    assert [each["text"] for each in both] == [answer["text"]] * 2

    # Long, as a busy machine sends what has gathered as one piece.
    long = {**sampling, "max_new_tokens": 300, "ignore_eos": True}

    async def read() -> list[str]:
        return [piece async for piece in runtime.async_generate("The capital of France is", long)]

    pieces = asyncio.run(read())
    assert len(pieces) > 1
    assert "".join(pieces).startswith(answer["text"])
    assert runtime.add_request.__func__ is runtime.async_generate.__func__


def test_refusals_carry_the_servers_words(runtime: Runtime) -> None:
    with pytest.raises(BackendError, match=r"400.*top_p"):
        runtime.generate("x", {"top_p": 7})

    async def read() -> None:
        async for _ in runtime.async_generate("x", {"top_p": 7}):
            pass

    with pytest.raises(BackendError, match=r"400.*top_p"):
        asyncio.run(read())


def test_information_and_the_tokenizer(runtime: Runtime) -> None:
    info = asyncio.run(runtime.get_server_info())
    assert info["model_path"] == str(MODEL_PATH)
    assert runtime.get_tokenizer().decode(runtime.get_tokenizer().encode("Paris")) == "Paris"
    runtime.cache_prefix("once upon a time")


def test_secrets_are_not_in_the_list_of_processes(runtime: Runtime) -> None:
    with open(f"/proc/{runtime.pid}/cmdline", "rb") as words:
        assert KEY.encode() not in words.read()


def test_api_back_ends_of_our_own_server(runtime: Runtime) -> None:
    chat = headrace.OpenAI("default", base_url=f"{runtime.url}/v1", api_key=KEY)
    text = headrace.OpenAI("default", False, base_url=f"{runtime.url}/v1", api_key=KEY)
    claude = headrace.Anthropic("default", base_url=runtime.url, api_key=KEY)
    answer = capital.run("France", backend=runtime)["answer"]

    @function
    def pick(s):
        s += user("Is water wet?")
        s += assistant("It is " + select("sure", ["yes", "no", "no"]))

    for backend in (chat, claude):
        state = capital.run("France", backend=backend)
        assert state["answer"] == answer
        assert state.get_meta_info("answer")["prompt_tokens"] > 0
        streamed = capital.run("France", backend=backend, stream=True)
        assert "".join(streamed.text_iter("answer")) == answer
    for backend in (chat, text):
        assert pick.run(backend=backend)["sure"] in ("yes", "no")
    scores = pick.run(backend=text).get_meta_info("sure")["normalized_prompt_logprobs"]
    assert scores[1] == pytest.approx(scores[2], abs=1e-4)


@pytest.mark.parametrize("name", [name for name in dir(test_programs) if name.startswith("test_")])
def test_the_programs_that_check_a_back_end(runtime: Runtime, name: str) -> None:
    before = headrace.global_config.default_backend
    headrace.set_default_backend(runtime)
    try:
        getattr(test_programs, name)()
    finally:
        headrace.set_default_backend(before)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match=r"ended with exit code 1.*last lines(.|\n)*no-model"):
        Runtime(model_path="/no-model", port=31000)
    with pytest.raises(TypeError, match="Did you mean 'model_path'"):
        Runtime(modelpath="x")
    with pytest.raises(TypeError, match="by their names"):
        Runtime("error", 1.0, "model")
