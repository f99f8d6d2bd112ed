"""Traces of requests as a collector receives them, and logs as JSON, of one server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.otlp_collector import Collector, attributes
from tests.support.server import READY_LINE, ROOT, ServerProcess
from tests.support.waiting import until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLING = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[ServerProcess]:
    options = ("--otlp-traces-endpoint", collector.address, "--log-format", "json")
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_RESOURCE_ATTRIBUTES": "zone=a"}
    with ServerProcess(*options, "--enable-metrics", "--log-requests", **environment) as running:
        yield running.wait_ready()


def parent_of(trace_id: str, *, is_sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{CALLER}-0{is_sampled:d}"}


def spans_of(collector: Collector, trace_id: str, count: int) -> list[Any]:
    until(lambda: len(collector.of_trace(trace_id)) >= count, what=f"{count} spans")
    found = collector.of_trace(trace_id)
    assert len(found) == count, [span.name for span in found]
    return found


def test_a_request_is_a_span_with_its_stages_below(
    server: ServerProcess, collector: Collector
) -> None:
    body = {"text": "The miller opens the gate", "sampling_params": SAMPLING, "rid": "mill-1"}
    before = time.time_ns()
    response = server.client.post("/generate", json=body, headers=parent_of(TRACE))
    meta = response.json()["meta_info"]
    spans = {span.name: span for span in spans_of(collector, TRACE, 5)}
    root, sample = spans["POST /generate"], spans["text_completion demo-toy"]
    assert root.parent_span_id.hex() == CALLER
    assert response.headers["traceresponse"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    assert sample.parent_span_id == root.span_id
    stages = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {span.parent_span_id for span in stages} == {sample.span_id}
    # One stage begins where the one before ends, and all lie within the sample.
    times = [sample.start_time_unix_nano]
    for span in stages:
        assert abs(span.start_time_unix_nano - times[-1]) < 1000
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        times.append(span.end_time_unix_nano)
    assert before <= root.start_time_unix_nano <= times[0] + 1_000_000
    assert times[-1] <= sample.end_time_unix_nano + 1000
    assert sample.end_time_unix_nano <= root.end_time_unix_nano + 1_000_000
    facts = attributes(sample)
    assert facts["gen_ai.operation.name"] == "text_completion"
    assert facts["gen_ai.response.id"] == "mill-1"
    assert facts["gen_ai.response.finish_reasons"] == ["length"]
    assert facts["gen_ai.usage.input_tokens"] == meta["prompt_tokens"]
    assert facts["gen_ai.usage.output_tokens"] == meta["completion_tokens"] == 8
    assert facts["gen_ai.usage.cache_read.input_tokens"] == meta["cached_tokens"]
    assert facts["gen_ai.request.max_tokens"] == 8
    assert 0 < facts["gen_ai.latency.time_to_first_token"] <= facts["gen_ai.latency.e2e"]
    assert attributes(root)["http.response.status_code"] == 200
    assert attributes(root)["headrace.request_id"] == response.headers["x-request-id"]
    assert {"service.name": "headrace", "zone": "a"}.items() <= collector.resources[0].items()


def test_each_sample_has_its_span_and_chat_its_name(
    server: ServerProcess, collector: Collector
) -> None:
    trace = f"{2:032x}"
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    body = {"model": "m", "messages": messages, "max_tokens": 4, "n": 2}
    server.client.post("/v1/chat/completions", json=body, headers=parent_of(trace))
    names = [span.name for span in spans_of(collector, trace, 9)]
    assert names.count("chat demo-toy") == 2
    assert names.count("decode") == 2


def test_the_caller_decides_whether_a_request_is_sampled(
    server: ServerProcess, collector: Collector
) -> None:
    unsampled, sampled = f"{3:032x}", f"{4:032x}"
    body = {"text": "a", "sampling_params": SAMPLING}
    answer = server.client.post(
        "/generate", json=body, headers=parent_of(unsampled, is_sampled=False)
    )
    assert re.fullmatch(f"00-{unsampled}-[0-9a-f]{{16}}-00", answer.headers["traceresponse"])
    server.client.post("/generate", json=body, headers=parent_of(sampled))
    spans_of(collector, sampled, 5)
    assert collector.of_trace(unsampled) == []


@pytest.mark.parametrize(
    "sent", ["", "00-zz-zz-01", f"00-{'0' * 32}-{CALLER}-01", "ff" * 40, f"{TRACE}\xff"]
)
def test_without_a_usable_context_a_trace_begins(
    server: ServerProcess, collector: Collector, sent: str
) -> None:
    headers = {"traceparent": sent.encode("latin-1")} if sent else {}
    body = {"text": "a", "sampling_params": SAMPLING}
    answer = server.client.post("/generate", json=body, headers=headers)
    assert answer.status_code == 200
    trace = answer.headers["traceresponse"].split("-")[1]
    assert trace not in (TRACE, "0" * 32)
    root = spans_of(collector, trace, 5)[0]
    assert root.parent_span_id == b""


def test_a_client_that_leaves_and_a_refusal_are_traced(
    server: ServerProcess, collector: Collector
) -> None:
    left, refused = f"{5:032x}", f"{6:032x}"
    body = {"text": "a", "stream": True, "sampling_params": {**SAMPLING, "max_new_tokens": 400}}
    with server.client.stream("POST", "/generate", json=body, headers=parent_of(left)) as response:
        next(response.iter_lines())
    until(lambda: any("text_completion" in span.name for span in collector.of_trace(left)))
    (sample,) = [span for span in collector.of_trace(left) if "text_completion" in span.name]
    assert attributes(sample)["gen_ai.response.finish_reasons"] == ["disconnect"]
    server.client.post("/generate", json={"text": 3}, headers=parent_of(refused))
    (root,) = spans_of(collector, refused, 1)
    assert attributes(root)["http.response.status_code"] == 400


def test_probes_and_scrapes_are_not_traced(server: ServerProcess) -> None:
    for path in ("/livez", "/metrics", "/v1/loads", "/no/such/path"):
        assert "traceresponse" not in server.client.get(path, headers=parent_of(TRACE)).headers


def test_a_collector_that_hangs_holds_up_no_request(
    server: ServerProcess, collector: Collector
) -> None:
    collector.answers.clear()
    try:
        posts = collector.num_posts
        trace = f"{7:032x}"
        body = {"text": "a", "sampling_params": SAMPLING}
        server.client.post("/generate", json=body, headers=parent_of(trace))
        until(lambda: collector.num_posts > posts)
        # The exporter's thread waits for the collector now.
        for _ in range(5):
            assert server.client.post("/generate", json=body).status_code == 200
        assert collector.of_trace(trace) == []
    finally:
        collector.answers.set()
    spans_of(collector, trace, 5)


def test_every_line_of_the_log_is_an_object_that_names_its_request(
    server: ServerProcess,
) -> None:
    trace = f"{8:032x}"
    body = {"text": "a\nb", "sampling_params": SAMPLING, "rid": "of-the-log"}
    answer = server.client.post("/generate", json=body, headers=parent_of(trace))
    server.wait_for_line('"of-the-log"')
    server.wait_for_line(answer.headers["x-request-id"])
    until(lambda: sum(trace in line for line in server.lines) >= 2)
    lines = [json.loads(line) for line in server.lines]
    assert any(line.get("message") == READY_LINE for line in lines)
    (access,) = [
        line
        for line in lines
        if line.get("logger") == "server.access" and line.get("trace_id") == trace
    ]
    assert access["request_id"] == answer.headers["x-request-id"]
    assert (access["method"], access["path"], access["status_code"]) == ("POST", "/generate", 200)
    (request,) = [line for line in lines if line.get("rid") == "of-the-log"]
    assert (request["request_id"], request["trace_id"]) == (access["request_id"], trace)
    assert request["output"] == 8
    assert {"front", "worker"} <= {line.get("process") for line in lines}
    # Outside of requests there is none.
    assert "request_id" not in lines[0]


def test_an_address_that_cannot_be_is_one_line() -> None:
    command = [sys.executable, "-m", "server.launch", "--model-path", "demo-toy"]
    done = subprocess.run(
        [*command, "--otlp-traces-endpoint", "ftp://host", "--log-format", "json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "--otlp-traces-endpoint 'ftp://host' is not" in json.loads(line)["message"]


def test_it_stops_in_time_without_its_collector() -> None:
    # Nothing listens there.
    with ServerProcess("--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces") as server:
        server.wait_ready()
        body = {"text": "a", "sampling_params": SAMPLING}
        assert server.client.post("/generate", json=body).status_code == 200
        server.signal()
        assert server.wait_exit() == 0
