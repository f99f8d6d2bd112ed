"""Scores, profiles, logs and cloud routes against a real engine with a tiny random model."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.errors import InvalidRequest
from runtime.service.profiling import make_folder
from tests.faults.test_kill import children_by_name
from tests.support.server import ServerProcess, running_server
from tests.support.tiny_models import VOCAB_SIZE, tiny_model
from tests.support.waiting import until

QUERY = "The miller opens the gate, the wheel turns, and the stones grind"
ITEMS = [" wheat.", " barley and oats.", " nothing at all."]
LABELS = [5, 300, 77]


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server may write them."""
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(profiles: Path) -> ServerProcess:
    return running_server("qwen3", "--enable-metrics", "--profile-root", str(profiles))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The demo model behind a key, quiet, with the environment of Vertex AI."""
    options = ("--api-key", "SECRET", "--log-level", "warning", "--skip-server-warmup")
    traces = str(tmp_path_factory.mktemp("traces"))
    with ServerProcess(
        *options, AIP_PREDICT_ROUTE="/predict", SGLANG_TORCH_PROFILER_DIR=traces
    ) as server:
        server.wait_ready()
        server.client.headers["Authorization"] = "Bearer SECRET"
        yield server


def score(server: ServerProcess, **body: Any) -> dict[str, Any]:
    answer = server.client.post("/v1/score", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(server: ServerProcess, text: str) -> list[int]:
    return server.client.post("/tokenize", json={"prompt": text}).json()["tokens"]


# ---- scores -------------------------------------------------------------------------------------


def test_scores_are_the_models_own_probabilities(server):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)
    ids = [ids_of(server, QUERY + item) for item in ITEMS]
    expected = []
    for each in ids:
        with torch.no_grad():
            expected.append(model(torch.tensor([each])).logits[0, -1].softmax(-1)[LABELS].tolist())
    answer = score(server, query=QUERY, items=ITEMS, label_token_ids=LABELS, model="m")
    assert (answer["object"], answer["model"]) == ("scoring", "m")
    for got, wanted in zip(answer["scores"], expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-3)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    soft = score(server, query=QUERY, items=ITEMS, label_token_ids=LABELS, apply_softmax=True)
    for got, wanted in zip(soft["scores"], expected, strict=True):
        assert sum(got) == pytest.approx(1)
        assert got == pytest.approx([each / sum(wanted) for each in wanted], rel=1e-3)


def test_scores_of_ids_and_of_items_first(server):
    query, items = [7, 8, 9] * 8, [[11, 12], [13]]
    asked = {"query": query, "items": items, "label_token_ids": LABELS}
    ahead = {"query": [], "items": [item + query for item in items], "label_token_ids": LABELS}
    turned = score(server, **asked, item_first=True)["scores"]
    for got, wanted in zip(turned, score(server, **ahead)["scores"], strict=True):
        assert got == pytest.approx(wanted, rel=1e-4)
    assert turned != score(server, **asked)["scores"]
    text = score(server, query=QUERY, items=ITEMS[0], label_token_ids=LABELS)["scores"]
    same = {"items": [ids_of(server, QUERY + ITEMS[0])], "label_token_ids": LABELS}
    assert score(server, **same)["scores"][0] == pytest.approx(text[0], rel=1e-4)
    each = score(server, query=query, items=items, label_token_ids=[[5], [300, 77]])["scores"]
    assert [len(row) for row in each] == [1, 2]
    assert score(server, query=QUERY, items=[], label_token_ids=LABELS)["scores"] == []


def test_the_query_is_computed_once(server):
    server.client.post("/flush_cache?timeout=10").raise_for_status()
    query = "A query that nobody has asked before, long enough for some pages: " * 2

    def cached() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("sglang:cached_tokens_total")
        )

    before = cached()
    score(server, query=query, items=ITEMS, label_token_ids=LABELS)
    pages = len(ids_of(server, query)) // 16
    assert pages >= 2
    assert cached() - before >= 2 * (pages - 1) * 16


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"query": "a", "label_token_ids": [1]}, "items must be given"),
        ({"query": "a", "items": ["b"]}, "label_token_ids must name"),
        ({"query": "a", "items": ["b"], "label_token_ids": [1, 1]}, "must not repeat"),
        ({"query": "a", "items": ["b"], "label_token_ids": [-1]}, "must be in [0,"),
        ({"query": "a", "items": ["b"], "label_token_ids": [VOCAB_SIZE + 9999]}, "must be in [0,"),
        ({"query": "a", "items": ["b"], "label_token_ids": [[1], [2]]}, "each of the 1 items"),
        ({"query": "a", "items": ["b"], "label_token_ids": [1, [2]]}, "list of ids or"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "must both be texts"),
        ({"query": [1], "items": ["b"], "label_token_ids": [1]}, "must both be texts"),
        ({"query": "a", "items": [5], "label_token_ids": [1]}, "`$.items[0]`"),
        ({"query": "", "items": [""], "label_token_ids": [1]}, "input_ids cannot be empty"),
        ({"query": [1], "items": [[10**6]], "label_token_ids": [1]}, "input_ids must be in"),
        ({"items": ["b"], "label_token_ids": [1], "temperature": 2}, "temperature must be 1"),
    ],
)
def test_what_cannot_be_scored(server, body, word):
    answer = server.client.post("/v1/score", json=body)
    assert answer.status_code == 400, answer.text
    # The dialect of /v1: flat keys and OpenAI's object.
    assert word in answer.json()["message"]
    assert answer.json()["error"]["message"] == answer.json()["message"]


# ---- profiles -----------------------------------------------------------------------------------


def wait_for(path: Path, timeout_s: float = 20.0) -> dict[str, Any]:
    until(path.exists, timeout_s, f"no {path}")
    with gzip.open(path, "rt") as file:
        return json.load(file)


def test_a_profile_of_each_stage_and_one_that_is_stopped(server, profiles):
    # Neither is there yet.
    tmp_path = profiles / "of" / "stages"
    body = {"text": QUERY, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    asked = {
        "output_dir": str(tmp_path),
        "num_steps": 2,
        "profile_by_stage": True,
        "profile_id": "s",
        "with_stack": False,
        "record_shapes": True,
    }
    server.client.post("/start_profile", json=asked).raise_for_status()
    server.client.post("/generate", json=body).raise_for_status()
    # The decode steps end the stage of the one prompt.
    extend = wait_for(tmp_path / "s-TP-0-EXTEND.trace.json.gz")
    decode = wait_for(tmp_path / "s-TP-0-DECODE.trace.json.gz")
    assert len(extend["traceEvents"]) > 10
    assert any("Input Dims" in event.get("args", {}) for event in decode["traceEvents"])

    asked = {"output_dir": str(tmp_path), "profile_id": "open", "activities": ["CPU"]}
    assert server.client.get("/start_profile", params={}).status_code == 200
    assert server.client.get("/stop_profile").status_code == 200
    server.client.post("/start_profile", json={**asked, "start_step": 0}).raise_for_status()
    server.client.post("/generate", json=body).raise_for_status()
    stopped = server.client.post("/stop_profile")
    assert stopped.status_code == 200
    assert str(tmp_path) in stopped.text
    # The file is there as soon as the call returns.
    assert wait_for(tmp_path / "open-TP-0.trace.json.gz", 0)["traceEvents"]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"activities": ["RPD"]}, "activities may hold"),
        ({"activities": ["MEM"]}, "need a GPU"),
        ({"activities": ["GPU"]}, "need a GPU"),
        ({"num_steps": 0}, "num_steps must be in"),
        ({"num_steps": 10**9}, "num_steps must be in"),
        ({"start_step": -1}, "start_step must be"),
        ({"profile_by_stage": True}, "num_steps must be given"),
        ({"num_steps": 1, "profile_stages": ["draft"]}, "profile_stages may hold"),
        ({"profile_id": "../../etc/x"}, "becomes part of a file's name"),
        ({"profile_prefix": ".hidden"}, "becomes part of a file's name"),
        ({"output_dir": "/proc/nowhere"}, "output_dir must lie in "),
        ({"output_dir": "/"}, "output_dir must lie in "),
        ({"output_dir": "a\0b"}, "output_dir has characters that cannot be printed"),
        ({"output_dir": "a\nINFO forged"}, "output_dir has characters that cannot be printed"),
        ({"output_dir": "../beside"}, "output_dir must not climb"),
        ({"output_dir": "a/../../beside"}, "output_dir must not climb"),
        ({"output_dir": "x" * 5000}, "output_dir cannot be made"),
        ({"output_dir": "planted"}, "output_dir cannot be made, or a link leads to it"),
        ({"output_dir": "planted/inside"}, "output_dir cannot be made, or a link leads to it"),
        ({"output_dir": 5}, "Expected `str | null`"),
    ],
)
def test_profiles_that_cannot_be_made(server, profiles, tmp_path, body, word):
    with contextlib.suppress(FileNotFoundError):
        (profiles / "planted").unlink()
    (profiles / "planted").symlink_to(tmp_path)
    answer = server.client.post("/start_profile", json=body)
    assert answer.status_code == 400
    assert word in answer.text
    assert server.client.post("/stop_profile").status_code == 400
    assert list(tmp_path.iterdir()) == []
    assert not (profiles.parent / "beside").exists()
    assert not any(line.startswith("INFO forged") for line in server.lines)


def test_the_default_folder_is_nobody_elses(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = tmp_path / f"headrace-profiles-{os.getuid()}"
    assert make_folder(None, None) == str(mine)
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    assert make_folder(None, "a/b") == str(mine / "a" / "b")
    mine.chmod(0o777)
    with pytest.raises(InvalidRequest, match="--profile-root"):
        make_folder(None, None)
    shutil.rmtree(mine)
    mine.symlink_to(tmp_path)
    with pytest.raises(InvalidRequest, match="link"):
        make_folder(None, None)


def test_every_rank_writes_its_own_profile_and_one_holds_all(tmp_path):
    with ServerProcess(
        *("--model-path", str(tiny_model("llama")), "--tp-size", "2", "--num-threads", "1"),
        *("--profile-root", str(tmp_path)),
    ) as server:
        server.wait_ready()
        asked = {
            "output_dir": str(tmp_path),
            "num_steps": 3,
            "profile_id": "t",
            "merge_profiles": True,
            "with_stack": False,
        }
        server.client.post("/start_profile", json=asked).raise_for_status()
        body = {"text": "The", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        server.client.post("/generate", json=body).raise_for_status()
        merged = wait_for(tmp_path / "merged-t-TP-all.trace.json.gz")
        counts = [
            len(wait_for(tmp_path / f"t-TP-{rank}.trace.json.gz", 0)["traceEvents"])
            for rank in (0, 1)
        ]
        assert len(merged["traceEvents"]) == sum(counts)
        ranks = {str(event["pid"]).split()[0] for event in merged["traceEvents"] if "pid" in event}
        assert ranks == {"TP-0", "TP-1"}
        # Both still compute the same steps.
        assert server.client.post("/generate", json=body).status_code == 200


# ---- pace, garbage, logs ------------------------------------------------------------------------


def test_slow_down_and_freeze(server):
    body = {"text": "The", "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}

    def seconds() -> float:
        started_at = time.monotonic()
        server.client.post("/generate", json=body).raise_for_status()
        return time.monotonic() - started_at

    server.client.post("/slow_down", json={"forward_sleep_time": 0.03}).raise_for_status()
    try:
        assert seconds() > 20 * 0.03
    finally:
        assert server.client.post("/slow_down").json() is None
    for bad in (-1, 1e9, "fast"):
        answer = server.client.post("/slow_down", json={"forward_sleep_time": bad})
        assert answer.status_code == 400
    assert server.client.post("/freeze_gc").status_code == 200
    assert server.client.get("/freeze_gc").status_code == 405


def test_logging_is_configured_while_it_runs(demo):
    def ask(rid: str) -> None:
        sampling = {"max_new_tokens": 3, "temperature": 0, "stop": ["never"]}
        body = {"text": "private\nwords", "rid": rid, "sampling_params": sampling}
        demo.client.post("/generate", json=body).raise_for_status()

    def configure(**body: Any) -> None:
        answer = demo.client.post("/configure_logging", json=body)
        assert (answer.status_code, answer.content) == (200, b"")

    ask("unlogged")
    configure(log_requests=True)
    ask("numbers")
    demo.wait_for_line("rid=numbers", 60)
    configure(log_requests_level=1)
    ask("sampled")
    demo.wait_for_line("rid=sampled", 60)
    configure(log_requests_level=3, log_requests_format="json")
    ask("whole")
    demo.wait_for_line('"rid": "whole"', 60)
    configure(log_requests=False, log_level="debug")
    ask("over")
    demo.wait_for_line("Prefill: 1 sequences", 60)
    lines = {
        rid: [line for line in demo.lines if rid in line]
        for rid in ("unlogged", "numbers", "sampled", "whole", "over")
    }
    assert {rid: len(found) for rid, found in lines.items()} == {
        "unlogged": 0,
        "numbers": 1,
        "sampled": 1,
        "whole": 1,
        "over": 0,
    }
    assert "private" not in lines["numbers"][0] + lines["sampled"][0]
    assert '"stop": ["never"]' in lines["sampled"][0]
    whole = json.loads(lines["whole"][0])
    assert whole["prompt_text"].endswith("private\nwords")
    assert (whole["output"], whole["end"]) == (3, "length")
    assert whole["output_text"]
    assert whole["sampling"]["max_new_tokens"] == 3
    assert "SECRET" not in demo.log
    for bad, word in (
        ({"log_requests_level": 4}, "must be in [0, 3]"),
        ({"log_requests_format": "xml"}, "expected 'json' or 'text'"),
        ({"dump_requests_folder": "/tmp/x"}, "not supported"),
    ):
        answer = demo.client.post("/configure_logging", json=bad)
        assert answer.status_code == 400
        assert word in answer.text


def test_options_change_while_it_runs_and_survive_the_worker(demo):
    def ask(values: Any, method: str = "POST") -> httpx.Response:
        return demo.client.request(method, "/set_internal_state", json={"server_args": values})

    def is_full() -> bool:
        body = {"text": "The", "sampling_params": {"max_new_tokens": 1}}
        return demo.client.post("/generate", json=body).status_code == 503

    assert not is_full()
    assert ask({"max_queued_requests": 0, "decode_log_interval": 1}).json() == [True]
    assert demo.client.get("/server_info").json()["max_queued_requests"] == 0
    # No place to wait, not even for the next step.
    assert is_full()
    os.kill(children_by_name(demo)["scheduler"], signal.SIGKILL)

    def is_back() -> bool:
        info = demo.client.get("/server_info").json()
        return info["num_restarts"] == 1 and info["status"] == "ready"

    until(is_back, 60, "never ready again")
    assert is_full()
    assert ask({"max_queued_requests": 10}, "PUT").json() == [True]
    assert not is_full()
    # Of the reference, for what this server does not have.
    assert ask({"pp_max_micro_batch_size": 8}).json() == [False]
    assert ask({"max_queued_requests": 5, "pp_max_micro_batch_size": 8}).json() == [False]
    assert demo.client.get("/server_info").json()["max_queued_requests"] == 10
    for bad, word in (
        ({"tp_size": 2}, "cannot change while the server runs"),
        ({"max_queued_requests": -1}, "must be a whole number in"),
        ({"decode_log_interval": 1.5}, "must be a whole number in"),
        ({"decode_log_interval": "9"}, "Expected `float`"),
    ):
        refused = ask(bad)
        assert refused.status_code == 400
        assert word in refused.text


# ---- clouds -------------------------------------------------------------------------------------


def test_vertex(server):
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    parameters = {"sampling_params": sampling}
    texts = ["The wheel", "barley"]
    body = {"instances": [{"text": text} for text in texts], "parameters": parameters}
    got = server.client.post("/vertex_generate", json=body).json()
    wanted = server.client.post("/generate", json={"text": texts, **parameters}).json()
    assert [each["text"] for each in got["predictions"]] == [each["text"] for each in wanted]
    ids = {"instances": [{"input_ids": [5, 6, 7]}], "parameters": parameters}
    (only,) = server.client.post("/vertex_generate", json=ids).json()["predictions"]
    assert only["meta_info"]["prompt_tokens"] == 3
    assert server.client.post("/vertex_generate", json={"instances": []}).json() == {
        "predictions": []
    }
    for bad, word in (
        ({}, "instances"),
        ({"instances": [{}]}, "must have one of"),
        ({"instances": [{"text": "a"}, {"input_ids": [1]}]}, "Every instance must have text"),
        ({"instances": [{"text": "a"}], "parameters": {"stream": True}}, "not possible"),
        ({"instances": [{"text": "a"}], "parameters": {"text": "b"}}, "belongs in"),
        ({"instances": [{"text": 5}]}, "Expected `str`"),
        ({"instances": [{"text": "a"}], "parameters": {"sampling_params": {"x": 1}}}, "`x`"),
    ):
        answer = server.client.post("/vertex_generate", json=bad)
        assert answer.status_code == 400, answer.text
        assert word in answer.text, answer.text
    assert server.client.get("/health").status_code == 200


def test_vertex_and_sagemaker_on_the_demo_model(demo):
    parameters = {"sampling_params": {"temperature": 0}}
    body = {"instances": [{"text": "The capital of France is"}], "parameters": parameters}
    answer = demo.client.post("/predict", json=body)
    assert answer.json()["predictions"][0]["text"].startswith(" Paris")
    assert demo.client.post("/vertex_generate", json=body).status_code == 404
    chat = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    answers = [
        demo.client.post(path, json=chat).json()["choices"][0]["message"]
        for path in ("/invocations", "/v1/chat/completions")
    ]
    assert answers[0] == answers[1]
    assert "Paris" in answers[0]["content"]
    events = demo.client.post("/invocations", json={**chat, "stream": True}).text
    assert events.rstrip().endswith("data: [DONE]")
    started = demo.client.post("/start_profile", json={"profile_id": "d"})
    assert "/traces" in started.text
    demo.client.post("/stop_profile").raise_for_status()
