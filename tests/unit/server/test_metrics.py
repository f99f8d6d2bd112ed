"""The values of `/metrics` and their names."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.config.options import LoggingArgs
from tests.support.fake_server import FakeServer, scrape


async def test_metrics_count_exactly(tmp_path):
    server = FakeServer(tmp_path, logging=LoggingArgs(enable_metrics=True))
    answers = [
        (await server.generate(text="hello")).json(),
        *(await server.generate(text=["a", "b"])).json(),
        json.loads((await server.generate(text="xyz", stream=True)).text.split("\n\n")[-3][6:]),
    ]
    await server.generate(text="uncounted", log_metrics=False)
    await server.client.get("/x/random/1")
    await server.client.get("/x/random/2")
    samples = await scrape(server)
    metas = [answer["meta_info"] for answer in answers]
    total = "sglang:prompt_tokens_total", ""
    assert samples[total] == sum(meta["prompt_tokens"] for meta in metas)
    generated = sum(meta["completion_tokens"] for meta in metas)
    assert samples["sglang:generation_tokens_total", ""] == generated
    assert samples["sglang:num_requests_total", ""] == 4
    assert samples["sglang:e2e_request_latency_seconds_count", ""] == 4
    assert samples["sglang:time_to_first_token_seconds_count", ""] == 4
    assert samples["sglang:queue_time_seconds_count", ""] == 4
    assert samples["sglang:inter_token_latency_seconds_count", ""] == 3
    assert samples["sglang:http_requests_total", "/generate"] == 4
    assert samples["sglang:http_requests_total", "other"] == 2
    assert samples["sglang:http_requests_active", ""] == 1
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput"):
        assert (f"sglang:{name}", "") in samples
    assert not [name for name, _ in samples if name.startswith("vllm:") or "waiting_reqs" in name]


async def test_other_names_of_the_metrics_say_the_same(tmp_path):
    logging = LoggingArgs(enable_metrics=True, metrics_aliases=["vllm", "aibrix"])
    server = FakeServer(tmp_path, logging=logging, dp_size=2)
    for replica in server.context.status.replicas:
        shared = replica.shared
        shared["num_running_reqs"], shared["num_queue_reqs"] = 3 + replica.rank, 5 + replica.rank
        shared["max_total_num_tokens"], shared["num_used_tokens"] = 1600, 400
        shared["prompt_tokens_total"], shared["cached_tokens_total"] = 90, 30
    text = (await server.client.get("/metrics")).text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    shape = {"block_size": "16", "num_gpu_blocks": "100", "enable_prefix_caching": "True"}
    for rank in (0, 1):
        labels = {"model_name": "fake", "engine": str(rank)}
        found = {s.name: s.value for s in samples if s.labels == labels}
        assert found == {
            "vllm:num_requests_running": 3 + rank,
            "vllm:num_requests_waiting": 5 + rank,
            "vllm:kv_cache_usage_perc": 0.25,
            "vllm:gpu_cache_usage_perc": 0.25,
            "vllm:prefix_cache_queries_total": 90,
            "vllm:prefix_cache_hits_total": 30,
            "vllm:gpu_prefix_cache_queries_total": 90,
            "vllm:gpu_prefix_cache_hits_total": 30,
        }
        (config,) = [s for s in samples if s.labels == {**labels, **shape}]
        assert (config.name, config.value) == ("vllm:cache_config_info", 1)
    waiting = {s.labels["dp_rank"]: s.value for s in samples if s.name == "sglang:num_waiting_reqs"}
    assert waiting == {"0": 5, "1": 6}


async def test_another_prefix_renames_all_and_changes_nothing(tmp_path):
    logging = LoggingArgs(enable_metrics=True, metrics_aliases=["vllm", "aibrix"])
    server = FakeServer(tmp_path, logging=logging, dp_size=2)
    await server.generate(text="hello")
    usual = await scrape(server)
    found = await scrape(server, "?prefix=headrace_")
    renamed = {
        name.replace("sglang:", "headrace_")
        .replace("prompt_tokens_histogram", "request_prompt_tokens")
        .replace("generation_tokens_histogram", "request_generation_tokens")
        for name, _ in usual
    }
    assert {name for name, _ in found} == renamed
    assert found["headrace_http_requests_total", "/generate"] == 1
    assert found["headrace_request_prompt_tokens_count", ""] == 1
    assert found["vllm:num_requests_running", ""] == usual["vllm:num_requests_running", ""]
    # The next scrape has the usual names again.
    assert {name for name, _ in await scrape(server)} == {name for name, _ in usual}


@pytest.mark.parametrize(
    "prefix", ["_", "a", "a:", "9_", "a-b_", "a_%0A", "%C3%A9_", "a_{}_", "a" * 64 + "_"]
)
async def test_a_prefix_that_breaks_names_is_refused(tmp_path, prefix):
    server = FakeServer(tmp_path, logging=LoggingArgs(enable_metrics=True))
    refused = await server.client.get(f"/metrics?prefix={prefix}")
    assert refused.status_code == 400
    assert "prefix must be" in refused.text
    assert (await server.client.get("/metrics?prefix=" + "a" * 63 + "_")).status_code == 200


async def test_openai_routes_are_counted_too(tmp_path):
    server = FakeServer(tmp_path, logging=LoggingArgs(enable_metrics=True))
    body = {"model": "m", "prompt": "hello", "max_tokens": 4}
    assert (await server.client.post("/v1/completions", json=body)).status_code == 200
    samples = await scrape(server)
    assert samples["sglang:prompt_tokens_total", ""] == 5
    assert samples["sglang:http_requests_total", "/v1/completions"] == 1


# One probe waits its 20 seconds for a token that does not come.
@pytest.mark.slow
async def test_probes_and_warm_up_are_http_requests_and_no_others(tmp_path):
    server = FakeServer(tmp_path, logging=LoggingArgs(enable_metrics=True))
    for path in ("/livez", "/health_generate", "/health_generate"):
        await server.client.get(path)
    # As the warm-up asks.
    assert (await server.generate(text="warm", log_metrics=False)).status_code == 200
    samples = await scrape(server)
    assert samples["sglang:num_requests_total", ""] == 0
    assert samples["sglang:generation_tokens_total", ""] == 0
    assert samples["sglang:http_requests_total", "/health_generate"] == 2
    assert samples["sglang:http_requests_total", "/livez"] == 1
    assert samples["sglang:http_requests_total", "/generate"] == 1


async def test_metrics_are_off_unless_asked_for(tmp_path):
    server = FakeServer(tmp_path)
    assert (await server.client.get("/metrics")).status_code == 404
