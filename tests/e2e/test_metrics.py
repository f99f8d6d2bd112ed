"""`/metrics` of a real server shows how a request's time is spent."""

from concurrent.futures import ThreadPoolExecutor

from prometheus_client.parser import text_string_to_metric_families

from tests.support.native import queues, slowed
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

BODY = {"text": "The wheel", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
STAGES = ("prefill_waiting", "prefill_forward", "decode_loop")


def scrape(server: ServerProcess) -> dict[str, float]:
    """Values by name; a stage's behind its name."""
    found = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            stage = sample.labels.get("stage")
            found[sample.name + (f":{stage}" if stage else "")] = sample.value
    return found


def test_waiting_and_first_tokens_of_requests_without_a_stream():
    args = ("--model-path", str(tiny_model("qwen3")), "--enable-metrics", "--metrics-aliases")
    with ServerProcess(*args, "vllm", "aibrix", "--max-running-requests", "1") as server:
        server.wait_ready()

        def ask(_: int) -> float:
            answer = server.client.post("/generate", json=BODY)
            return answer.raise_for_status().json()["meta_info"]["e2e_latency"]

        # All are there before the first begins.
        pause = {"mode": "in_place"}
        server.client.post("/pause_generation", json=pause).raise_for_status()
        # A busy front tells of an end when the next has begun: next to a second that is nothing.
        with slowed(server, 0.01), ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(ask, n) for n in range(3)]
            until(lambda: queues(server)["paused"] == 3)
            server.client.post("/continue_generation", json={}).raise_for_status()
            e2e = sorted(answer.result() for answer in answers)
        found = scrape(server)
    for name in ("time_to_first_token", "queue_time", "e2e_request_latency"):
        assert found[f"sglang:{name}_seconds_count"] == 3
    stages = [found[f"sglang:per_stage_req_latency_seconds_sum:{stage}"] for stage in STAGES]
    waited, prompts, decoded = stages
    # One after the other: the last waits for both before it, the second for the first.
    assert waited == found["sglang:queue_time_seconds_sum"]
    assert waited > 0.9 * (e2e[0] + e2e[1])
    assert decoded > prompts
    total = found["sglang:e2e_request_latency_seconds_sum"]
    first = found["sglang:time_to_first_token_seconds_sum"]
    assert abs(sum(stages) - total) < 0.1 * total
    assert abs(waited + prompts - first) < 0.01 * total
    assert 0 < found["sglang:engine_load_weights_time"] < found["sglang:engine_startup_time"]
    assert found["sglang:num_retracted_reqs"] == 0
    assert found["vllm:num_requests_waiting"] == found["sglang:num_waiting_reqs"] == 0
