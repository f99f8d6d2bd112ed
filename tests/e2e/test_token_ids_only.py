"""`--skip-tokenizer-init`: token ids in, token ids out, no tokenizer anywhere."""

import json
import shutil

import pytest

import headrace as sgl
from headrace.demo import MODEL_PATH
from runtime.text.tokenizer import Tokenizer
from tests.support.server import ServerProcess

GREEDY = {"temperature": 0, "max_new_tokens": 8}
PROMPT = "What is the capital of France?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo model without any file of its tokenizer."""
    copy = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(MODEL_PATH, copy, ignore=shutil.ignore_patterns("token*", "*.jinja"))
    assert not (copy / "tokenizer.json").exists()
    return copy


@pytest.fixture(scope="module")
def ids():
    return Tokenizer.from_folder(MODEL_PATH).encode(PROMPT)


@pytest.fixture(scope="module")
def expected(ids):
    """What a server with a tokenizer generates."""
    with sgl.Engine(model_path=str(MODEL_PATH)) as engine:
        return engine.generate(input_ids=ids, sampling_params=GREEDY)["output_ids"]


@pytest.fixture(scope="module")
def server(folder):
    options = ("--model-path", str(folder), "--skip-tokenizer-init")
    with ServerProcess(*options) as process:
        yield process.wait_ready()


def ask(server, path="/generate", **body):
    return server.client.post(path, json=body, timeout=60)


def test_ids_go_in_and_come_out(server, ids, expected):
    answer = ask(server, input_ids=[ids, ids[:3]], sampling_params=GREEDY).json()
    assert answer[0]["output_ids"] == expected
    assert all("text" not in each for each in answer)
    assert answer[0]["meta_info"]["prompt_tokens"] == len(ids)
    assert "/generate" in server.log, "the example to paste is one that works"


def test_streams_have_no_text_either(server, ids, expected):
    body = {"input_ids": ids, "sampling_params": GREEDY, "stream": True}
    events = server.client.post("/generate", json=body, timeout=60).text.split("\n\n")
    chunks = [json.loads(each.removeprefix("data: ")) for each in events if "{" in each]
    assert chunks[-1]["output_ids"] == expected
    assert not any("text" in each for each in chunks)


def test_stop_tokens_stop(server, ids, expected):
    stops = GREEDY | {"stop_token_ids": [expected[1]]}
    answer = ask(server, input_ids=ids, sampling_params=stops).json()
    assert answer["output_ids"] == expected[:2]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": expected[1]}


def test_log_probabilities_have_no_text(server, ids):
    answer = ask(server, input_ids=ids, sampling_params=GREEDY, return_logprob=True).json()
    logprobs = answer["meta_info"]["output_token_logprobs"]
    assert [each[1] for each in logprobs] == answer["output_ids"]
    assert {each[2] for each in logprobs} == {None}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": PROMPT}),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"stop": "x"}}),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"stop_regex": "x+"}}),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"min_new_tokens": 2}}),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"regex": "a+"}}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"model": "m", "prompt": "hi"}),
        ("/v1/completions", {"model": "m", "prompt": [1, 2]}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
    ids=str,
)
def test_what_needs_text_is_refused(server, path, body):
    answer = ask(server, path, **body)
    assert answer.status_code == 400, answer.text
    assert "tokenizer" in answer.text or "structured output is off" in answer.text
    assert server.client.get("/health_generate", timeout=60).status_code == 200


def test_an_engine(folder, ids, expected):
    with sgl.Engine(model_path=str(folder), skip_tokenizer_init=True) as engine:
        one = engine.generate(input_ids=ids, sampling_params=GREEDY)
        assert one["output_ids"] == expected
        assert "text" not in one
        many = engine.generate(input_ids=[ids] * 3, sampling_params=GREEDY)
        assert [each["output_ids"] for each in many] == [expected] * 3
        parts = list(engine.generate(input_ids=ids, sampling_params=GREEDY, stream=True))
        assert [token for part in parts for token in part["output_ids"]] == expected
        assert not any("text" in part or "text_delta" in part for part in parts)
        with pytest.raises(ValueError, match="input_ids"):
            engine.generate(PROMPT, GREEDY)
