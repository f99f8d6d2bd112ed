"""Log-probabilities of `/generate` over HTTP."""

import json
import math

import pytest

from tests.support.server import ServerProcess, running_server

TEXT = "The miller opens the gate, the wheel turns, and the stones grind wheat, barley and oats."
SHORT = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return running_server("qwen3", "--chunked-prefill-size", "16")


def ask(server: ServerProcess, **body) -> dict | list:
    asked = {"return_logprob": True, "sampling_params": SHORT, **body}
    response = server.client.post("/generate", json=asked)
    assert response.status_code == 200, response.text
    return response.json()


def values(triples: list) -> list[float]:
    return [triple[0] for triple in triples]


def test_output_only(server):
    answer = ask(server, text=TEXT)
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == []
    triples = meta["output_token_logprobs"]
    assert len(triples) == meta["completion_tokens"] == 6
    assert [triple[1] for triple in triples] == answer["output_ids"]
    assert all(triple[2] is None for triple in triples)
    assert all(math.isfinite(value) and value <= 0 for value in values(triples))
    assert not {"output_top_logprobs", "output_token_ids_logprobs"} & meta.keys()
    plain = ask(server, text=TEXT, return_logprob=False, top_logprobs_num=5, logprob_start_len=999)
    assert not [key for key in plain["meta_info"] if "logprob" in key]
    assert plain["output_ids"] == answer["output_ids"]


def test_input_from_a_start(server):
    whole = None
    for start in (0, 1, 7, 16, 17):
        meta = ask(server, text=TEXT, logprob_start_len=start)["meta_info"]
        triples = meta["input_token_logprobs"]
        assert len(triples) == meta["prompt_tokens"] - start
        assert triples[0][0] is None
        whole = whole or triples
        assert values(triples[1:]) == pytest.approx(values(whole[start + 1 :]), abs=1e-3)
        assert [each[1] for each in triples] == [each[1] for each in whole[start:]]
        assert meta["cached_tokens"] <= start
    length = meta["prompt_tokens"]
    for start in (length - 1, length):
        meta = ask(server, text=TEXT, logprob_start_len=start)["meta_info"]
        assert len(meta["input_token_logprobs"]) == length - start


def test_most_probable_and_asked_for(server):
    answer = ask(
        server,
        text=TEXT,
        logprob_start_len=0,
        top_logprobs_num=5,
        token_ids_logprob=[9, 3],
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    for side in ("input", "output"):
        chosen = meta[f"{side}_token_logprobs"]
        top, asked = meta[f"{side}_top_logprobs"], meta[f"{side}_token_ids_logprobs"]
        assert len(top) == len(asked) == len(chosen)
        if side == "input":
            assert top[0] is asked[0] is None
            top, asked = top[1:], asked[1:]
        for triples in top:
            assert len(triples) == 5
            assert values(triples) == sorted(values(triples), reverse=True)
        assert all([triple[1] for triple in triples] == [9, 3] for triples in asked)
        assert all(isinstance(triple[2], str) for triple in chosen)
    best = [triples[0] for triples in meta["output_top_logprobs"]]
    assert best == meta["output_token_logprobs"]
    texts = [triple[2] for triple in meta["input_token_logprobs"]]
    assert "".join(texts).endswith(TEXT)


def test_a_batch_with_lists(server):
    answers = ask(
        server,
        text=[TEXT, "The wheel", "Oats"],
        return_logprob=[True, False, True],
        logprob_start_len=[0, 0, -1],
        top_logprobs_num=[2, 2, 0],
        token_ids_logprob=[[5], None, [7, 8]],
    )
    first, second, third = (answer["meta_info"] for answer in answers)
    assert len(first["input_token_logprobs"]) == first["prompt_tokens"]
    assert len(first["output_top_logprobs"][0]) == 2
    assert "output_token_logprobs" not in second
    assert third["input_token_logprobs"] == []
    assert [triple[1] for triple in third["output_token_ids_logprobs"][0]] == [7, 8]
    samples = ask(server, text=TEXT, sampling_params={**SHORT, "n": 2}, logprob_start_len=3)
    assert len(samples) == 2
    for answer in samples:
        meta = answer["meta_info"]
        assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] - 3


def test_a_stop_string_ends_the_lists_too(server):
    params = {**SHORT, "max_new_tokens": 16}
    whole = ask(server, text=TEXT, sampling_params=params)
    stop = whole["text"][len(whole["text"]) // 2 :][:2]
    answer = ask(server, text=TEXT, sampling_params={**params, "stop": stop})
    assert answer["meta_info"]["finish_reason"]["matched"] == stop
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [triple[1] for triple in triples] == answer["output_ids"]
    assert len(triples) < 16


def test_streams_are_cumulative(server):
    body = {
        "text": [TEXT, "The wheel"],
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "sampling_params": SHORT,
    }
    with server.client.stream("POST", "/generate", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    last: dict[int, dict] = {}
    for line in lines[:-1]:
        event = json.loads(line)
        meta = event["meta_info"]
        triples = meta["output_token_logprobs"]
        assert [triple[1] for triple in triples] == event["output_ids"]
        assert len(meta["output_top_logprobs"]) == len(triples)
        assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
        last[event["index"]] = event
    for index, whole in enumerate(ask(server, **{**body, "stream": False})):
        streamed = last[index]["meta_info"]
        for key in ("input_token_logprobs", "output_token_logprobs"):
            mine, theirs = streamed[key], whole["meta_info"][key]
            assert [each[1] for each in mine] == [each[1] for each in theirs]
            begin = key == "input_token_logprobs"
            assert values(mine[begin:]) == pytest.approx(values(theirs[begin:]), abs=1e-3)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"logprob_start_len": 1000}, "logprob_start_len"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"top_logprobs_num": 1001}, "top_logprobs_num"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
        ({"token_ids_logprob": [10**6]}, "token_ids_logprob"),
        ({"token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"token_ids_logprob": [[1], 2]}, "token_ids_logprob"),
        ({"token_ids_logprob": [[1], [2]]}, "token_ids_logprob"),
        ({"top_logprobs_num": [1, 2]}, "top_logprobs_num"),
        ({"return_logprob": "yes"}, "return_logprob"),
        ({"return_logprob": [True], "sampling_params": {"n": 2}}, "return_logprob"),
        ({"logprob_start_len": [0], "sampling_params": {"n": 2}}, "logprob_start_len"),
        ({"top_logprobs_num": [0], "sampling_params": {"n": 2}}, "top_logprobs_num"),
        ({"token_ids_logprob": [[0]], "sampling_params": {"n": 2}}, "token_ids_logprob"),
    ],
)
def test_refusals_name_the_field(server, fields, word):
    body = {"text": "The wheel", "return_logprob": True, **fields}
    response = server.client.post("/generate", json=body)
    assert response.status_code == 400, response.text
    assert word in response.text
    assert server.client.get("/health").status_code == 200
