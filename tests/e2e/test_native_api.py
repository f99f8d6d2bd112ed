"""The native API over HTTP against a real engine with a tiny random model."""

import concurrent.futures
import statistics
import time

import pytest

from tests.support.native import GREEDY, TEXT, generate, load, refused, slowed, until_idle
from tests.support.server import READY_LINE, ServerProcess, common_server, running_server
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.waiting import until


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return common_server()


def test_the_ready_line_comes_once_after_the_warm_up(server):
    assert server.lines.count(READY_LINE) == 1
    order = [
        next(i for i, line in enumerate(server.lines) if text in line)
        for text in ("GET /model_info 200", "POST /generate 200", READY_LINE)
    ]
    assert order == sorted(order)


def test_batches_equal_single_requests(server):
    params = {**GREEDY, "max_new_tokens": 6}
    prompts = ["The wheel", "barley", "Numbers such as 1"]
    singles = [generate(server, text=text, sampling_params=params) for text in prompts]
    batch = generate(server, text=prompts, sampling_params=params)
    assert [item["text"] for item in batch] == [item["text"] for item in singles]


def test_samples_share_their_prompt(server):
    params = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 1.0, "n": 4}
    # Short ones are computed each for itself: that costs less than a step of waiting.
    text = TEXT * 5
    answers = generate(server, text=text, extra_key="only here", sampling_params=params)
    found = sorted(each["meta_info"]["cached_tokens"] for each in answers)
    # One computes the prompt; the others find every full page of it.
    num_tokens = answers[0]["meta_info"]["prompt_tokens"]
    page_size = server.client.get("/server_info").json()["page_size"]
    assert found == [0] + [(num_tokens - 1) // page_size * page_size] * 3
    assert found[-1] > 0


def test_a_higher_priority_runs_sooner():
    server = running_server("qwen3", "--enable-priority-scheduling", "--max-running-requests", "1")
    ended = []

    def ask(priority: int, num: int) -> None:
        params = {**GREEDY, "max_new_tokens": num}
        answer = generate(server, text="The", priority=priority, sampling_params=params)
        # The threads that wait for the answers may be woken in another order.
        ended.append((answer["meta_info"]["response_sent_to_client_ts"], priority))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        tasks = []
        with slowed(server, 0.1):
            for total, (priority, num) in enumerate([(0, 100), (1, 5), (-3, 5), (7, 5)], 1):
                tasks.append(pool.submit(ask, priority, num))
                until(lambda total=total: load(server)["num_total_reqs"] >= total)  # type: ignore[misc]
                assert not tasks[0].done(), "too fast for the others to wait"
        for task in tasks:
            task.result()
    assert [priority for _, priority in sorted(ended)] == [0, 7, 1, -3]


def test_a_seed_repeats(server):
    params = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 5}
    first, again = (generate(server, text="The", sampling_params=params) for _ in range(2))
    assert first["output_ids"] == again["output_ids"]
    other = generate(server, text="The", sampling_params={**params, "sampling_seed": 6})
    assert other["output_ids"] != first["output_ids"]


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


def test_health_generate_makes_a_token(server):
    # A busy machine may hold it up, hardly every time.
    assert any(health_s(server, "/health_generate") < 5 for _ in range(3))


def health_s(server: ServerProcess, path: str = "/health") -> float:
    """Seconds until `path` answers."""
    started_at = time.monotonic()
    assert server.client.get(path).status_code == 200
    return time.monotonic() - started_at


@pytest.mark.alone
def test_health_is_quick_while_prompts_are_long(server):
    # How quick it can be while others keep the machine busy.
    calm_s = statistics.median(health_s(server) for _ in range(50))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        params = {"max_new_tokens": 100, "ignore_eos": True}
        tasks = [
            pool.submit(generate, server, text=[TEXT * 2] * 16, sampling_params=params)
            for _ in range(4)
        ]
        times = []
        while concurrent.futures.wait(tasks, timeout=0.01).not_done:
            times.append(health_s(server))
    assert statistics.median(times) < max(0.05, 4 * calm_s)
    until_idle(server)


def test_what_may_be_read_may_be_asked_for_without_its_body(server):
    for path in ("/health", "/livez", "/model_info", "/v1/models", "/metrics", "/v1/models/x"):
        # On one connection: a body would be taken for the next answer.
        head, whole = server.client.head(path), server.client.get(path)
        assert (head.status_code, head.content) == (whole.status_code, b""), path
        assert head.headers.get("content-type") == whole.headers.get("content-type")
    refused = server.client.head("/flush_cache")
    assert refused.status_code == 405
    assert "HEAD" not in refused.headers["allow"]
