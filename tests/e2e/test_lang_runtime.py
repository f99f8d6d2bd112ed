"""`Runtime`: a server that a program starts for itself; one for the file."""

import asyncio
import json
import os
from collections.abc import Iterator

import pytest

import headrace
from headrace import Runtime, assistant, function, gen, user
from headrace.demo import MODEL_PATH
from headrace.lang.program_errors import BackendError
from tests.support.processes import alive
from tests.support.waiting import until

KEY = "a-key of 'some' length"


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(
        model_path=str(MODEL_PATH), max_total_tokens=4096, port=31000, api_key=KEY, tp=1
    ) as found:
        yield found


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

    async def read() -> list[str]:
        return [
            piece async for piece in runtime.async_generate("The capital of France is", sampling)
        ]

    pieces = asyncio.run(read())
    assert len(pieces) > 1
    assert "".join(pieces) == answer["text"]
    assert runtime.add_request.__func__ is runtime.async_generate.__func__


def test_refusals_carry_the_servers_words(runtime: Runtime) -> None:
    with pytest.raises(BackendError, match="400.*top_p"):
        runtime.generate("x", {"top_p": 7})

    async def read() -> None:
        async for _ in runtime.async_generate("x", {"top_p": 7}):
            pass

    with pytest.raises(BackendError, match="400.*top_p"):
        asyncio.run(read())


def test_information_and_the_tokenizer(runtime: Runtime) -> None:
    info = asyncio.run(runtime.get_server_info())
    assert info["model_path"] == str(MODEL_PATH)
    assert runtime.get_tokenizer().decode(runtime.get_tokenizer().encode("Paris")) == "Paris"
    runtime.cache_prefix("once upon a time")


def test_secrets_are_not_in_the_list_of_processes(runtime: Runtime) -> None:
    with open(f"/proc/{runtime.pid}/cmdline", "rb") as words:
        assert KEY.encode() not in words.read()


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match=r"ended with exit code 1.*last lines(.|\n)*no-model"):
        Runtime(model_path="/no-model", port=31000)
    with pytest.raises(TypeError, match="Did you mean 'model_path'"):
        Runtime(modelpath="x")
    with pytest.raises(TypeError, match="by their names"):
        Runtime("error", 1.0, "model")


def test_it_ends_with_shutdown() -> None:
    runtime = Runtime(model_path=str(MODEL_PATH), max_total_tokens=2048)
    assert alive(runtime.pid)
    runtime.shutdown()
    runtime.shutdown()
    until(lambda: not alive(runtime.pid))
    assert runtime.pid != os.getpid()
