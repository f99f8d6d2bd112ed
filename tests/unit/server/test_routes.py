"""The native routes over a fake engine: answers, streams, refusals, health, counters."""

import asyncio
import itertools
import json
import re
import time

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.client.weight_gate import PAUSE, UPDATE
from runtime.config.options import LoggingArgs
from runtime.config.scheduling_options import SchedulingArgs
from runtime.ipc.messages import ControlReply, FinishReason
from tests.support.fake_server import FakeServer, scrape
from tests.support.waiting import until_in_loop


def params(**keys):
    return {"max_new_tokens": 16, **keys}


def events_of(response) -> list:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def until_in_flight(server: FakeServer, count: int) -> None:
    await until_in_loop(lambda: server.context.client.num_in_flight >= count)


async def test_one_object_or_a_list(tmp_path):
    server = FakeServer(tmp_path)
    one = (await server.generate(text="hello", sampling_params=params())).json()
    assert one["text"] == "hello"
    assert one["output_ids"][:5] == list(b"hello")
    many = (await server.generate(text=["b", "a"], sampling_params=params())).json()
    assert [item["text"] for item in many] == ["b", "a"]
    assert (await server.client.put("/generate", json={"text": "x"})).json()["text"] == "x"


async def test_meta_info(tmp_path):
    server = FakeServer(tmp_path)
    body = {"text": "hello", "rid": "mine", "return_prompt_token_ids": True}
    answer = (await server.generate(**body)).json()
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["prompt_tokens"] == 5
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert meta["weight_version"] == "default"
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert meta["e2e_latency"] >= 0
    assert answer["prompt_token_ids"] == list(b"hello")


async def test_a_stream_is_cumulative(tmp_path):
    server = FakeServer(tmp_path)
    response = await server.generate(text="hello", stream=True, sampling_params=params())
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert events[-1]["text"] == "hello"
    assert events[-1]["meta_info"]["finish_reason"] is not None


async def test_incremental_streaming_is_disjoint(tmp_path):
    server = FakeServer(tmp_path, incremental_streaming_output=True)
    events = events_of(await server.generate(text="hello", stream=True, sampling_params=params()))
    assert "".join(event["text"] for event in events) == "hello"
    num_tokens = sum(len(event["output_ids"]) for event in events)
    assert num_tokens == events[-1]["meta_info"]["completion_tokens"]


async def test_batch_streams_carry_an_index(tmp_path):
    server = FakeServer(tmp_path)
    response = await server.generate(text=["ab", "cd"], stream=True, sampling_params=params(n=2))
    last = {event["index"]: event["text"] for event in events_of(response)}
    assert last == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}


async def test_one_bad_prompt_refuses_all_and_runs_none(tmp_path):
    server = FakeServer(tmp_path)
    response = await server.generate(input_ids=[[1, 2], [999_999]])
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert server.context.client.num_in_flight == 0


async def test_a_stream_that_is_refused_keeps_its_status(tmp_path):
    server = FakeServer(tmp_path)
    server.engine.refuse = FinishReason(
        "abort", message="The request queue is full.", status_code=503
    )
    for stream in (False, True):
        response = await server.generate(text="a", stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        body = response.json()
        assert body["message"] == "The request queue is full."
        assert (body["object"], body["type"], body["code"]) == ("error", "503", 503)


async def test_a_rid_in_flight_is_refused(tmp_path):
    server = FakeServer(tmp_path, engine_options={"hold": "wait"})
    running = asyncio.create_task(server.generate(text="wait", rid="same"))
    await until_in_flight(server, 1)
    assert (await server.generate(text="a", rid="same")).status_code == 400
    assert (await server.client.post("/abort_request", json={"rid": "same"})).status_code == 200
    answer = await running
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert set(answer.json()["meta_info"]["finish_reason"]) <= {"type", "message"}


async def test_abort_is_exact_or_a_batch(tmp_path):
    server = FakeServer(tmp_path, engine_options={"hold": "wait"})
    tasks = [
        asyncio.create_task(server.generate(text=text, rid=rid))
        for text, rid in ((["wait", "wait"], "x"), ("wait", "xy"))
    ]
    await until_in_flight(server, 3)
    assert (await server.client.post("/abort_request", json={"rid": ""})).status_code == 200
    assert (await server.client.post("/abort_request")).status_code == 200
    await server.client.post("/abort_request", json={"rid": "x"})
    assert len((await tasks[0]).json()) == 2
    assert server.context.client.num_in_flight == 1
    await server.client.post("/abort_request", json={"abort_all": True})
    await tasks[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(tmp_path, stream):
    server = FakeServer(tmp_path, engine_options={"hold": "wait"})
    body = orjson.dumps({"text": ["wait", "wait"], "stream": stream})
    gone = asyncio.Event()
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "headers": [],
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
        "http_version": "1.1",
    }
    task = asyncio.create_task(server.app(scope, receive, send))
    await until_in_flight(server, 2)
    gone.set()
    await asyncio.wait_for(task, 60)
    assert server.context.client.num_in_flight == 0
    assert len(server.engine.aborted) == 2


async def test_tokens_there_and_back(tmp_path):
    server = FakeServer(tmp_path)
    for prefix in ("", "/v1"):
        one = (await server.client.post(f"{prefix}/tokenize", json={"prompt": "ab"})).json()
        assert one == {"tokens": [97, 98], "count": 2, "max_model_len": 4096}
        body = {"prompt": ["ab", ""], "add_special_tokens": False, "model": "x"}
        many = (await server.client.post(f"{prefix}/tokenize", json=body)).json()
        assert (many["tokens"], many["count"]) == ([[97, 98], []], [2, 0])
        for tokens, text in ([97, 98], "ab"), ([], ""), ([[97], [98]], ["a", "b"]):
            body = {"tokens": tokens}
            answer = await server.client.post(f"{prefix}/detokenize", json=body)
            assert answer.json() == {"text": text, "prompt": text}
    for tokens in (["a"], [True], [1.5], [[1], 2], 5, None, [-1], [10**6], [2**70]):
        response = await server.client.post("/detokenize", json={"tokens": tokens})
        assert response.status_code == 400
    assert (await server.client.post("/tokenize", json={})).status_code == 400
    wrong_type = await server.client.post("/v1/tokenize", content=b'{"prompt": "a"}')
    assert wrong_type.status_code == 400


async def test_what_a_client_needs_that_makes_prompts_itself(tmp_path):
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    server = FakeServer(tmp_path, chat_template=template)
    info = (await server.client.get("/tokenizer_info")).json()
    assert info["eos_token"] == server.context.tokenizer.eos_token is not None
    assert info.keys() > {"bos_token", "pad_token"}
    # What chat renders with, not what the folder holds.
    assert info["chat_template"] == template
    assert info["model_max_length"] == 4096


async def test_model_info_has_nine_keys(tmp_path):
    server = FakeServer(tmp_path)
    for path in ("/get_model_info", "/model_info"):
        assert set((await server.client.get(path)).json()) == {
            "model_path",
            "is_generation",
            "tokenizer_path",
            "preferred_sampling_params",
            "weight_version",
            "has_image_understanding",
            "has_audio_understanding",
            "model_type",
            "architectures",
        }


async def test_the_log_says_once_that_a_name_is_deprecated(tmp_path, caplog):
    server = FakeServer(tmp_path)
    for _ in range(2):
        for path in ("/model_info", "/server_info", "/get_model_info", "/get_server_info"):
            assert (await server.client.get(path)).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "deprecated" in record.message]
    assert [line.split()[1] for line in lines] == ["/get_model_info", "/get_server_info"]
    assert [line.split("use ")[1].split()[0] for line in lines] == ["/model_info", "/server_info"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/classify"),
        ("PUT", "/classify"),
        ("POST", "/pooling"),
        ("POST", "/v1/classify"),
        ("POST", "/v1/rerank"),
        ("PUT", "/v1/rerank"),
    ],
)
async def test_a_generation_model_does_not_score(tmp_path, path, method):
    server = FakeServer(tmp_path)
    body = {"model": "m", "text": "hello", "input": "hello", "query": "a", "documents": ["b"]}
    answer = await server.client.request(method, path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "generates text" in error["message"]
    if path.startswith("/v1/"):
        assert answer.json()["code"] == 400
        assert error["type"] == "invalid_request_error"
    else:
        assert answer.json() == {"error": {"message": error["message"]}}
    wrong = await server.client.get(path)
    allowed = "POST" if path in ("/v1/classify", "/pooling") else "POST, PUT"
    assert (wrong.status_code, wrong.headers["allow"]) == (405, allowed)


async def test_server_info_is_flat_with_states(tmp_path):
    server = FakeServer(tmp_path)
    info = (await server.client.get("/server_info")).json()
    for name in ("tp_size", "dp_size", "pp_size", "max_total_num_tokens", "max_total_tokens"):
        assert isinstance(info[name], int)
    assert info["version"] == "1.2.3"
    assert info["status"] == "ready"
    assert len(info["internal_states"]) == 1
    assert info["internal_states"][0]["memory_usage"]["token_capacity"] == 16384


async def test_loads(tmp_path):
    server = FakeServer(tmp_path)
    server.shared["num_running_reqs"] = 2
    server.shared["num_queue_reqs"] = 3
    server.shared["num_used_tokens"] = 4096
    loads = (await server.client.get("/v1/loads?include=core,disagg,queues,memory")).json()
    (load,) = loads["loads"]
    assert (load["num_running_reqs"], load["num_total_reqs"]) == (2, 5)
    assert load["token_usage"] == 0.25
    assert None not in load.values()
    (old,) = (await server.client.get("/get_load")).json()
    assert (old["num_reqs"], old["num_waiting_reqs"], old["num_tokens"]) == (5, 3, 4096)
    text = (await server.client.get("/v1/loads?format=prometheus")).text
    assert list(text_string_to_metric_families(text))
    for query in ("include=x", "format=xml", "dp_rank=1"):
        assert (await server.client.get(f"/v1/loads?{query}")).status_code == 400


async def test_requests_held_back_show_in_loads_and_metrics(tmp_path):
    server = FakeServer(tmp_path, logging=LoggingArgs(enable_metrics=True))
    gate = server.context.client.gate

    async def paused() -> tuple[int, float]:
        (load,) = (await server.client.get("/v1/loads")).json()["loads"]
        samples = await scrape(server)
        return load["queues"]["paused"], samples["sglang:num_paused_reqs", ""]

    gate.close(PAUSE)
    held = asyncio.create_task(server.generate(text=["a", "b"]))
    await until_in_flight(server, 2)
    assert await paused() == (2, 2)
    gate.open(PAUSE)
    assert len((await held).json()) == 2
    assert await paused() == (0, 0)


async def test_a_long_wait_for_weights_is_no_illness_but_no_welcome(tmp_path):
    server = FakeServer(tmp_path)
    gate = server.context.client.gate
    gate.close(UPDATE)
    assert (await server.client.get("/readyz")).status_code == 200
    gate._reasons[UPDATE] -= 42
    assert (await server.client.get("/health")).status_code == 200
    ready = await server.client.get("/readyz")
    assert ready.status_code == 503
    assert re.search(r"waited for new weights for 4\d s", ready.json()["reason"])
    gate.open(UPDATE)
    assert (await server.client.get("/readyz")).status_code == 200


async def test_health_follows_the_state(tmp_path):
    server = FakeServer(tmp_path, scheduling=SchedulingArgs(max_queued_requests=2))

    async def statuses():
        paths = ("/health", "/readyz", "/ready", "/ping", "/livez", "/startupz")
        return [(await server.client.get(path)).status_code for path in paths]

    up = [200] * 6
    assert await statuses() == up
    server.context.lifecycle.warmed_up = False
    assert await statuses() == [503, 503, 503, 503, 200, 503]
    server.context.lifecycle.warmed_up = True
    server.shared["num_queue_reqs"] = 2
    assert await statuses() == [503, 503, 503, 503, 200, 200]
    server.shared["num_queue_reqs"] = 0
    server.shared["heartbeat_time"] = time.monotonic() - 11
    assert await statuses() == [503, 503, 503, 503, 200, 200]
    server.shared["has_work"] = 1
    server.shared["heartbeat_time"] = time.monotonic() - 301
    assert await statuses() == [503, 503, 503, 503, 503, 200]
    server.shared.beat()
    assert await statuses() == up
    server.shared["detokenizer_time"] = time.monotonic() - 301
    assert await statuses() == [503, 503, 503, 503, 503, 200]
    reason = (await server.client.get("/readyz")).json()["reason"]
    assert re.fullmatch(r"The loop of the detokenizer has not run for 30\d s\.", reason)
    server.shared.beat_detokenizer()
    assert await statuses() == up
    server.context.lifecycle.draining = True
    response = await server.client.get("/health")
    assert response.status_code == 503
    assert response.json()["phase"] == "draining"
    assert response.headers["connection"] == "close"


async def test_a_worker_that_just_became_ready_is_not_stuck(tmp_path):
    server = FakeServer(tmp_path)
    server.shared.reset()
    server.shared["has_work"] = 1
    server.context.status.replicas[0].ready_at = time.monotonic()
    assert (await server.client.get("/livez")).status_code == 200
    assert (await server.client.get("/health")).status_code == 200


async def test_start_up_reports_progress(tmp_path):
    server = FakeServer(tmp_path)
    (status,) = server.context.status.replicas
    status.worker, status.phase, status.fraction = None, "loading_weights", 0.42
    response = await server.client.get("/startupz")
    assert response.status_code == 503
    assert response.json()["phase"] == "loading_weights"
    assert response.json()["progress"] == 0.42
    server.context.client.ready = False
    refused = await server.generate(text="a")
    assert refused.status_code == 503
    assert refused.headers["retry-after"]


async def test_health_generate_waits_for_a_token(tmp_path, monkeypatch):
    logging = LoggingArgs(enable_metrics=True)
    server = FakeServer(tmp_path, logging=logging, engine_options={"hold": "never"})
    assert (await server.client.get("/health_generate")).status_code == 200
    assert len(server.engine.requests) == 1
    assert (await scrape(server))["sglang:num_requests_total", ""] == 0
    monkeypatch.setattr("server.native.health.PROBE_TIMEOUT_S", 0.3)
    stuck = FakeServer(tmp_path, engine_options={"hold": "\0"})
    assert (await stuck.client.get("/health_generate")).status_code == 503
    assert stuck.context.client.num_in_flight == 0


async def test_flush_cache_says_when_it_did_not(tmp_path, monkeypatch):
    server = FakeServer(tmp_path)
    replies = [ControlReply(1, False, "busy"), ControlReply(1, True)]

    async def flush(timeout_s: float = 1.0) -> ControlReply:
        return replies[0] if len(replies) == 1 else replies.pop(0)

    monkeypatch.setattr(server.context.client.calls, "flush_cache", flush)
    assert (await server.client.post("/flush_cache")).status_code == 400
    assert (await server.client.get("/flush_cache")).status_code == 200
    replies.insert(0, ControlReply(1, False, "busy"))
    assert (await server.client.post("/flush_cache?timeout=5")).status_code == 200
    for timeout in ("-1", "x", "nan", "1e9"):
        response = await server.client.post(f"/flush_cache?timeout={timeout}")
        assert response.status_code == 400


async def test_docs_describe_bodies_or_are_closed(tmp_path):
    server = FakeServer(tmp_path)
    document = (await server.client.get("/openapi.json")).json()
    assert "sampling_params" in document["components"]["schemas"]["GenerateBody"]["properties"]
    closed = FakeServer(tmp_path, disable_docs=True)
    for path in ("/docs", "/openapi.json"):
        assert (await closed.client.get(path)).status_code == 404


async def test_the_request_log_has_numbers_not_texts(tmp_path, caplog):
    caplog.set_level("INFO", "server.requests")
    server = FakeServer(tmp_path, logging=LoggingArgs(log_requests=True))
    await server.generate(text="private words", rid="r1")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "server.requests"]
    assert "rid=r1" in line
    assert "prompt=13" in line
    assert "private" not in line


async def test_the_request_log_makes_up_no_text_for_embeddings(tmp_path, caplog):
    caplog.set_level("INFO", "server.requests")
    server = FakeServer(
        tmp_path,
        logging=LoggingArgs(log_requests=True, log_requests_level=3),
        scheduling=SchedulingArgs(disable_radix_cache=True),
        # Its own is what the ids beside embeddings look like.
        engine_options={"hold": "wait"},
    )
    rows = [[0.0] * server.context.model.hidden_size] * 3
    assert (await server.generate(input_embeds=rows)).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if record.name == "server.requests"]
    assert " prompt=3 " in line
    assert " prompt_text= " in line


@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_log_is_one_line_for_each_request(tmp_path, caplog, stream):
    caplog.set_level("INFO", "server.requests")
    server = FakeServer(tmp_path, logging=LoggingArgs(log_requests=True, log_requests_level=3))
    await server.generate(text="a\nFORGED\x1b[31m", stream=stream)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "server.requests"]
    assert line.isprintable()
    assert r'prompt_text="a\nFORGED\u001b[31m"' in line
    # Nobody sees a first token where all come at once.
    assert (" ttft=- " in line) is not stream


async def test_an_unknown_sampling_parameter_is_told_its_neighbour(tmp_path):
    server = FakeServer(tmp_path)
    answer = await server.generate(text="a", sampling_params={"temprature": 0})
    assert answer.status_code == 400
    assert "Did you mean 'temperature'?" in answer.json()["message"]
    # Beside it unknown keys are ignored, as SGLang does.
    assert (await server.generate(text="a", txet="b")).status_code == 200


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/moderations", "/v1/classify"),
        ("/v1/audio/speech", "speech"),
        ("/v1/audio/transcriptions", "speech"),
        ("/v1/audio/translations", "speech"),
        ("/v1/images/generations", "pictures"),
        ("/v1/images/edits", "pictures"),
        ("/v1/realtime/sessions", "/v1/responses"),
        ("/v1/videos", "pictures"),
        ("/v1/uploads", "/v1/files"),
        ("/v1/fine_tuning/jobs", "rl.md"),
        ("/v1/assistants", "previous_response_id"),
        ("/v1/threads/runs", "previous_response_id"),
        ("/v1/conversations", "previous_response_id"),
        ("/v1/vector_stores", "/v1/embeddings"),
        ("/v1/evals", "lm-eval"),
        ("/v1/containers", "does not run code"),
        ("/chat/completions", "/v1"),
        ("/v1/v1/messages", "twice"),
    ],
)
async def test_routes_of_other_apis_say_what_there_is(tmp_path, path, word):
    async with FakeServer(tmp_path).client as client:
        for method in ("GET", "POST"):
            answer = await client.request(method, path, json={})
            assert answer.status_code == 404
            assert word in answer.json()["message"]
            if path.startswith("/v1/"):
                assert answer.json()["error"]["type"] == "invalid_request_error"
