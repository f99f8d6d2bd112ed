"""The native API over HTTP against a real engine with a tiny random model."""

import concurrent.futures
import itertools
import json
import time

import httpx
import pytest

from tests.support.server import READY_LINE, ServerProcess, running_server
from tests.support.tiny_models import VOCAB_SIZE

GREEDY = {"temperature": 0, "ignore_eos": True}
TEXT = "The miller opens the gate, the wheel turns, and the stones grind wheat, barley and oats."


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return running_server("qwen3", "--enable-metrics")


def generate(server: ServerProcess, **body) -> dict | list:
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: ServerProcess, **body) -> str:
    response = server.client.post("/generate", json=body)
    assert response.status_code == 400, response.text
    assert server.client.get("/health").status_code == 200
    content = response.json()
    return content["error"]["message"] if "error" in content else content["message"]


def stream(server: ServerProcess, **body) -> list[dict]:
    with server.client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def running(server: ServerProcess) -> dict:
    return server.client.get("/v1/loads").json()["loads"][0]


def until_idle(server: ServerProcess) -> None:
    deadline = time.monotonic() + 10
    while True:
        load = running(server)
        if not load["num_total_reqs"] and not load["num_used_tokens"]:
            return
        assert time.monotonic() < deadline, load
        time.sleep(0.05)


def test_the_ready_line_comes_once_after_the_warm_up(server):
    assert server.lines.count(READY_LINE) == 1
    order = [
        next(i for i, line in enumerate(server.lines) if text in line)
        for text in ("GET /model_info 200", "POST /generate 200", READY_LINE)
    ]
    assert order == sorted(order)


def test_the_length_default_is_128(server):
    answer = generate(server, text="The", sampling_params={"ignore_eos": True})
    assert answer["meta_info"]["completion_tokens"] == 128
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 128}


def test_nothing_to_generate_is_legal(server):
    answer = generate(server, text="The wheel", sampling_params={"max_new_tokens": 0})
    assert answer["text"] == ""
    assert answer["output_ids"] == []
    assert answer["meta_info"]["completion_tokens"] == 0
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_ids_and_text_give_the_same(server):
    ids = server.client.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    params = {**GREEDY, "max_new_tokens": 8}
    by_text = generate(server, text=TEXT, sampling_params=params)
    by_ids = generate(server, input_ids=ids, sampling_params=params)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_ids["meta_info"]["prompt_tokens"] == len(ids)


def test_batches_equal_single_requests(server):
    params = {**GREEDY, "max_new_tokens": 6}
    prompts = ["The wheel", "barley", "Numbers such as 1"]
    singles = [generate(server, text=text, sampling_params=params) for text in prompts]
    batch = generate(server, text=prompts, sampling_params=params)
    assert [item["text"] for item in batch] == [item["text"] for item in singles]


def test_the_prefix_cache_shows_and_flushes(server):
    until_idle(server)
    assert server.client.post("/flush_cache").status_code == 200
    body = {"text": TEXT, "sampling_params": {**GREEDY, "max_new_tokens": 4}}
    cold = generate(server, **body)
    warm = generate(server, **body)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] > 0
    assert cold["output_ids"] == warm["output_ids"]
    other = generate(server, **body, extra_key="tenant")
    assert other["meta_info"]["cached_tokens"] == 0
    until_idle(server)
    assert server.client.get("/flush_cache").status_code == 200
    assert generate(server, **body)["meta_info"]["cached_tokens"] == 0


def test_stop_strings(server):
    params = {**GREEDY, "max_new_tokens": 24}
    whole = generate(server, text="The", sampling_params=params)["text"]
    stop = whole[len(whole) // 2 :][:3]
    where = whole.index(stop)
    cut = generate(server, text="The", sampling_params={**params, "stop": stop})
    assert cut["text"] == whole[:where]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = generate(
        server, text="The", sampling_params={**params, "stop": stop, "no_stop_trim": True}
    )
    assert kept["text"] == whole[: where + len(stop)]
    for event in stream(server, text="The", sampling_params={**params, "stop": [stop]}):
        assert stop not in event["text"]


def test_stop_token_ids(server):
    params = {"temperature": 0, "max_new_tokens": 24}
    ids = generate(server, text="The", sampling_params={**params, "ignore_eos": True})["output_ids"]
    token = ids[5]
    cut = generate(server, text="The", sampling_params={**params, "stop_token_ids": [token]})
    assert cut["output_ids"] == ids[: ids.index(token) + 1]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert cut["meta_info"]["completion_tokens"] == ids.index(token) + 1
    through = {**params, "stop_token_ids": [token], "ignore_eos": True}
    assert generate(server, text="The", sampling_params=through)["output_ids"] == ids


def test_logit_bias_decides(server):
    params = {"temperature": 0, "max_new_tokens": 1, "logit_bias": {"77": 1000}}
    assert generate(server, text="The", sampling_params=params)["output_ids"] == [77]


def test_a_seed_repeats(server):
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 5}
    first, again = (generate(server, text="The", sampling_params=params) for _ in range(2))
    assert first["output_ids"] == again["output_ids"]
    other = generate(server, text="The", sampling_params={**params, "sampling_seed": 6})
    assert other["output_ids"] != first["output_ids"]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": 0},
        {"min_p": 2},
        {"frequency_penalty": 3},
        {"repetition_penalty": 3},
        {"min_new_tokens": 5, "max_new_tokens": 4},
        {"max_new_tokens": -1},
        {"max_new_tokens": 2**63},
        {"stop_token_ids": [VOCAB_SIZE]},
        {"logit_bias": {str(VOCAB_SIZE): 1}},
        {"logit_bias": {"x": 1}},
        {"n": 0},
        {"n": 10**9},
        {"stop": ["x"] * 1000},
        {"top_k": True},
        {"temperature": "1"},
        {"unheard_of": 1},
        {"sampling_seed": 2**70},
    ],
)
def test_sampling_params_out_of_bounds_are_refused(server, params):
    assert refused(server, text="The", sampling_params=params)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input_ids": []},
        {"input_ids": [-1]},
        {"input_ids": [VOCAB_SIZE]},
        {"input_ids": [2**31]},
        {"input_ids": [1.0]},
        {"input_ids": [[1], []]},
        {"text": "a" * 10_000_000},
        {"text": "a", "rid": "x" * 10**6},
        {"text": "a", "cache_salt": "x" * 10**6},
        {"text": "a", "lora_path": "/etc"},
        {"text": "a", "return_hidden_states": True},
        {"text": "a", "sampling_params": {"max_new_tokens": 10**6}},
        {"text": TEXT * 20},
    ],
)
def test_bodies_that_cannot_be_served_are_refused(server, body):
    assert refused(server, **body)


def test_no_limit_fills_the_context(server):
    answer = generate(
        server, text="The", sampling_params={"max_new_tokens": None, "ignore_eos": True}
    )
    meta = answer["meta_info"]
    assert meta["prompt_tokens"] + meta["completion_tokens"] == 256


def test_streams_equal_whole_answers(server):
    params = {**GREEDY, "max_new_tokens": 40}
    whole = generate(server, text=TEXT, sampling_params=params)
    # Pieces are joined while the machine keeps the front waiting: one whole answer in a single
    # piece may happen once, not always.
    tries = (stream(server, text=TEXT, sampling_params=params) for _ in range(10))
    events = next(events for events in tries if len(events) > 10)
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_batched_streams_equal_whole_answers(server):
    prompts, params = ["The wheel", "barley"], {**GREEDY, "max_new_tokens": 12}
    whole = generate(server, text=prompts, sampling_params=params)
    last = {e["index"]: e for e in stream(server, text=prompts, sampling_params=params)}
    assert [last[index]["text"] for index in (0, 1)] == [item["text"] for item in whole]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_its_place(server, streaming):
    body = {"text": "The", "stream": streaming, "sampling_params": {"max_new_tokens": 250}}
    body["sampling_params"]["ignore_eos"] = True
    with httpx.Client(base_url=server.url, timeout=0.05 if not streaming else 30) as client:
        if streaming:
            with client.stream("POST", "/generate", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.TimeoutException):
                client.post("/generate", json={**body, "text": ["The"] * 64})
    until_idle(server)


def test_health_generate_makes_a_token(server):
    started_at = time.monotonic()
    assert server.client.get("/health_generate").status_code == 200
    assert time.monotonic() - started_at < 5


def test_health_is_quick_while_prompts_are_long(server):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        params = {"max_new_tokens": 100, "ignore_eos": True}
        tasks = [
            pool.submit(generate, server, text=[TEXT * 2] * 16, sampling_params=params)
            for _ in range(4)
        ]
        times = []
        while not all(task.done() for task in tasks):
            started_at = time.monotonic()
            assert server.client.get("/health").status_code == 200
            times.append(time.monotonic() - started_at)
            time.sleep(0.01)
    assert sorted(times)[len(times) // 2] < 0.05
    until_idle(server)
