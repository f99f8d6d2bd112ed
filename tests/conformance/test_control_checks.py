"""Control, keys, metrics and limits from outside: one test for each numbered check of the contract.

Every test asks a real server with a tiny random model, over HTTP.
"""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.grammar_backends import BACKENDS
from tests.support.server import ServerProcess, running_server
from tests.support.waiting import until

NINE_KEYS = {
    *("model_path", "is_generation", "tokenizer_path", "preferred_sampling_params"),
    *("weight_version", "has_image_understanding", "has_audio_understanding", "model_type"),
    "architectures",
}
ENDLESS = {"max_new_tokens": 250, "ignore_eos": True}
# Request-level metrics of the contract: there after one request.
REQUEST_METRICS = {
    *("prompt_tokens_total", "generation_tokens_total", "cached_tokens_total"),
    *("num_requests_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("e2e_request_latency_seconds", "prompt_tokens_histogram", "generation_tokens_histogram"),
    *("num_so_requests_total", "num_aborted_requests_total", "http_requests_total"),
    *("request_time_per_output_token_seconds", "http_responses_total", "http_requests_active"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    root = tmp_path_factory.getbasetemp()
    return running_server("qwen3", "--enable-metrics", "--profile-root", str(root))


@pytest.fixture(scope="module")
def limited() -> ServerProcess:
    """Keys, a queue for one, prompts cut to fit, no metrics."""
    return running_server(
        "qwen3",
        *("--api-key", "user", "--admin-api-key", "admin", "--allow-auto-truncate"),
        *("--max-running-requests", "1", "--max-queued-requests", "1"),
    )


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def load(server: ServerProcess, key: str = "none") -> dict[str, Any]:
    return server.client.get("/v1/loads", headers=bearer(key)).json()["loads"][0]


def until_idle(server: ServerProcess) -> None:
    until(lambda: not any(load(server)[k] for k in ("num_total_reqs", "num_used_tokens")))


def samples(server: ServerProcess) -> dict[str, float]:
    page = server.client.get("/metrics")
    assert page.status_code == 200
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


# ---- start and state ----------------------------------------------------------------------------


def test_check_3_model_info_has_nine_keys(server):
    info = server.client.get("/get_model_info").json()
    assert set(info) == NINE_KEYS
    assert info["model_path"] == server.process.args[server.process.args.index("--model-path") + 1]


def test_check_4_server_info(server):
    info = server.client.get("/get_server_info").json()
    assert info["tp_size"] == info["dp_size"] == len(info["internal_states"]) == 1
    assert info["max_total_num_tokens"] > 0
    assert info["version"]
    assert info["internal_states"][0]["memory_usage"]["token_capacity"] > 0
    assert server.client.get("/server_info").json().keys() == info.keys()


def test_check_5_unknown_path_and_method(server):
    unknown = server.client.get("/concate_and_append_request")
    assert (unknown.status_code, unknown.json()["detail"]) == (404, "Not Found")
    wrong = server.client.get("/generate")
    assert (wrong.status_code, wrong.json()["detail"]) == (405, "Method Not Allowed")


# ---- control ------------------------------------------------------------------------------------


def test_check_49_flush_cache_idle_and_busy(server):
    until_idle(server)
    for method in ("POST", "GET"):
        assert server.client.request(method, "/flush_cache").status_code == 200
    body = {"text": "The", "stream": True, "sampling_params": ENDLESS}
    # Slowed down, so that the request surely runs while the cache is asked to go.
    server.client.post("/slow_down", json={"forward_sleep_time": 0.05}).raise_for_status()
    try:
        with server.client.stream("POST", "/generate", json=body) as answer:
            lines = answer.iter_lines()  # held: a dropped iterator closes the connection
            next(lines)
            refused = server.client.post("/flush_cache")
            assert refused.status_code == 400
            assert "1 requests are running" in refused.text
    finally:
        assert server.client.post("/slow_down", json={"forward_sleep_time": None}).json() is None
    assert server.client.post("/flush_cache?timeout=10").status_code == 200


def test_check_50_abort(server):
    server.client.post("/slow_down", json={"forward_sleep_time": 0.05}).raise_for_status()
    try:
        with ThreadPoolExecutor(1) as pool:
            body = {"text": ["The"] * 3, "sampling_params": ENDLESS}
            call = pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=60)
            until(lambda: load(server)["num_running_reqs"] == 3)
            abort = server.client.post("/abort_request", json={"abort_all": True})
            assert (abort.status_code, abort.content) == (200, b"")
            answer = call.result(60)
    finally:
        server.client.post("/slow_down", json={}).raise_for_status()
    assert answer.status_code == 200
    for each in answer.json():
        meta = each["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        # The text so far, not the whole of it.
        assert 0 < meta["completion_tokens"] == len(each["output_ids"]) < 250
    assert server.client.post("/abort_request", json={"rid": "nobody"}).status_code == 200
    until_idle(server)


def traced(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def test_check_55_profile(server, tmp_path):
    folder = tmp_path / "new" / "folder"
    body = {"output_dir": str(folder), "num_steps": 3, "profile_prefix": "p", "profile_id": "one"}
    started = server.client.post("/start_profile", json=body)
    assert started.status_code == 200, started.text
    assert started.headers["content-type"].startswith("text/plain")
    again = server.client.post("/start_profile", json=body)
    assert again.status_code == 400
    assert "already running" in again.json()["error"]["message"]
    answer = server.client.post(
        "/generate", json={"text": "The mill", "sampling_params": {"max_new_tokens": 8}}
    )
    assert answer.status_code == 200
    path = folder / "p-one-TP-0.trace.json.gz"
    until(path.exists, what="no trace")
    names = {event.get("name") for event in traced(path)}
    assert any(str(name).startswith("aten::") for name in names)
    assert list(folder.iterdir()) == [path]
    # It has ended by itself.
    idle = server.client.post("/stop_profile")
    assert idle.status_code == 400
    assert "No profile is running" in idle.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("text", "parser", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nSo.", "qwen3", "why", "So."),
        ("So.", "qwen3", "", "So."),
        ("why</think>So.", "deepseek-r1", "why", "So."),
        ("still thinking", "qwen3-thinking", "still thinking", ""),
        ("<think>a</think>b", "glm45", "a", "b"),
    ],
)
def test_check_59_separate_reasoning(server, text, parser, reasoning, content):
    body = {"text": text, "reasoning_parser": parser}
    answer = server.client.post("/separate_reasoning", json=body)
    assert answer.json() == {"reasoning_text": reasoning, "text": content}


@pytest.mark.parametrize("parser", ["hermes", "qwen", "qwen25"])
def test_check_59_parse_function_call(server, parser):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("time", "weather")
    ]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ghent"}}\n</tool_call>'
    body = {"text": f"Let me look.\n{call}", "tools": tools, "tool_call_parser": parser}
    answer = server.client.post("/parse_function_call", json=body)
    assert answer.json() == {
        "normal_text": "Let me look.",
        "calls": [{"tool_index": 1, "name": "weather", "parameters": '{"city": "Ghent"}'}],
    }
    for path, wrong in (
        ("/parse_function_call", {**body, "tool_call_parser": "nope"}),
        ("/separate_reasoning", {"text": "a", "reasoning_parser": "nope"}),
    ):
        refused = server.client.post(path, json=wrong)
        assert refused.status_code == 400
        assert "Unknown" in refused.json()["error"]["message"]
        assert parser in refused.text or "qwen3" in refused.text


# ---- keys, metrics, limits ----------------------------------------------------------------------


def test_check_60_keys(limited):
    client = limited.client
    refused = client.post("/generate")
    assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
    # Under /v1/ every error has OpenAI's shape.
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/score")):
        refused = client.request(method, path)
        assert refused.status_code == refused.json()["code"] == 401
        assert refused.json()["error"]["type"] == "authentication_error"
    assert client.get("/health").status_code == 200
    # Open, though this server has none.
    assert client.get("/metrics").status_code == 404
    assert client.get("/v1/models", headers=bearer("user")).status_code == 200
    for path in (
        *("/flush_cache", "/start_profile", "/stop_profile", "/slow_down", "/freeze_gc"),
        *("/configure_logging", "/abort_request", "/set_internal_state"),
    ):
        assert client.post(path).status_code == 401
        refused = client.post(path, headers=bearer("user"))
        assert (refused.status_code, refused.json()) == (403, {"error": "Forbidden"})
    assert client.post("/flush_cache", headers=bearer("admin")).status_code == 200
    # With keys, nothing that changes the server answers GET.
    assert client.get("/start_profile", headers=bearer("admin")).status_code == 405


def test_check_61_metrics(server, limited):
    assert limited.client.get("/metrics").status_code == 404
    until_idle(server)
    before = samples(server)
    answer = server.client.post(
        "/generate",
        json={"text": "The miller opens the gate", "sampling_params": {"max_new_tokens": 7}},
    )
    meta = answer.json()["meta_info"]
    after = samples(server)
    for name in REQUEST_METRICS:
        assert any(key.startswith(f"sglang:{name}") for key in after), name
    for name, tokens in (
        ("sglang:prompt_tokens_total", meta["prompt_tokens"]),
        ("sglang:generation_tokens_total", meta["completion_tokens"]),
        ("sglang:cached_tokens_total", meta["cached_tokens"]),
        ("sglang:num_requests_total", 1),
        ("sglang:e2e_request_latency_seconds_count", 1),
    ):
        assert after[name] - before.get(name, 0.0) == tokens, name
    # Structured output is an optional part.
    is_structured = bool(BACKENDS)
    sampling = {"max_new_tokens": 7, **({"regex": "[a-z]+"} if is_structured else {})}
    body = {"text": "The", "stream": True, "sampling_params": sampling}
    server.client.post("/generate", json=body).raise_for_status()
    streamed = samples(server)
    for name, count in (
        ("time_to_first_token_seconds_count", 1),
        ("num_so_requests_total", is_structured),
    ):
        assert streamed[f"sglang:{name}"] - after[f"sglang:{name}"] == count, name


def test_check_62_a_full_queue(limited):
    body = {"text": "The", "sampling_params": ENDLESS}

    def send(_: int) -> httpx.Response:
        return limited.client.post("/generate", json=body, headers=bearer("user"), timeout=60)

    slow = {"forward_sleep_time": 0.05}
    with ThreadPoolExecutor(5) as pool:
        limited.client.post("/slow_down", json=slow, headers=bearer("admin")).raise_for_status()
        try:
            calls = [pool.submit(send, 0)]
            # Until it runs, it is the one that may wait.
            until(lambda: load(limited, "user")["num_running_reqs"] == 1)
            calls += [pool.submit(send, number) for number in range(1, 5)]
            until(lambda: sum(call.done() for call in calls) == 3)
        finally:
            limited.client.post("/slow_down", headers=bearer("admin")).raise_for_status()
        answers = [call.result() for call in calls]
    refused = [answer for answer in answers if answer.status_code == 503]
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) == 3
    assert len(served) == 2
    for answer in refused:
        assert answer.json()["message"] == "The request queue is full."
        assert int(answer.headers["retry-after"]) >= 1
    for answer in served:
        assert answer.json()["meta_info"]["completion_tokens"] == 250


def test_check_63_too_long(server, limited):
    body = {"input_ids": [7] * 300, "sampling_params": {"max_new_tokens": 4}}
    refused = server.client.post("/generate", json=body)
    assert refused.status_code == 400
    assert "is longer than the model's context length" in refused.json()["error"]["message"]
    much = {"text": "The", "sampling_params": {"max_new_tokens": 256}}
    refused = server.client.post("/generate", json=much)
    message = refused.json()["error"]["message"]
    assert "Requested token count exceeds the model's maximum context length" in message
    cut = limited.client.post("/generate", json=body, headers=bearer("user"))
    assert cut.status_code == 200
    assert 200 < cut.json()["meta_info"]["prompt_tokens"] < 256


def test_check_65_a_mixed_crowd_leaves_nothing_behind(server):
    bodies = [
        {"text": "The miller opens the gate", "sampling_params": {"max_new_tokens": 20}},
        {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 5, "n": 2}},
        {"text": "a", "sampling_params": {"top_p": 7}},
        {"input_ids": [99999]},
        {"text": "The wheel", "stream": True, "sampling_params": {"max_new_tokens": 30}},
        {"text": "x" * 5000},
    ]

    # Nobody waits for its end, and it cannot have come that soon.
    left = {"text": "The miller opens the gate", "sampling_params": ENDLESS}

    def send(index: int) -> int:
        body, timeout = (left, 0.03) if index % 7 == 0 else (bodies[index % len(bodies)], 60)
        try:
            return server.client.post("/generate", json=body, timeout=timeout).status_code
        except httpx.TimeoutException:
            return 0

    with ThreadPoolExecutor(8) as pool:
        codes = set(pool.map(send, range(200)))
    assert codes == {0, 200, 400}
    until_idle(server)
    gauges = samples(server)
    for name in ("num_running_reqs", "num_queue_reqs", "num_used_tokens"):
        assert gauges[f"sglang:{name}"] == 0, name
