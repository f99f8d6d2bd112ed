"""Generation stops and goes on, and memory is really given back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file

from headrace.trainer import tensor_body
from tests.support.fake_checkpoint import expected_tensors, write_config
from tests.support.native import load, queues, slowed, until_running
from tests.support.server import ServerProcess, running_server
from tests.support.tiny_models import tiny_model, write_tokenizer
from tests.support.waiting import until

ONE_THREAD = ("--num-threads", "1", "--random-seed", "1")
LONG = 200


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return server.client.post(path, json=body, timeout=60)


def generate(server: ServerProcess, num: int = 16, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": num, "ignore_eos": True}
    answer = post(server, "/generate", sampling_params=sampling, **{"text": "wheel"} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(params=[1, 2], ids=["one-rank", "two-ranks"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    model = {1: "qwen3", 2: "llama_biased"}[request.param]
    yield (server := running_server(model, *ONE_THREAD, "--tp-size", str(request.param)))
    assert post(server, "/continue_generation").status_code == 200
    assert server.client.get("/ready").status_code == 200


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def assert_nothing_moves(server: ServerProcess, *futures: Future[Any]) -> None:
    generated = load(server)
    time.sleep(0.4)
    assert not any(future.done() for future in futures)
    assert load(server)["num_used_tokens"] == generated["num_used_tokens"]


def test_in_place_freezes_and_goes_on(server: ServerProcess, pool: ThreadPoolExecutor) -> None:
    expected = generate(server, LONG)["output_ids"]
    expected_short = generate(server, text="miller")["output_ids"]
    with slowed(server):
        running = pool.submit(generate, server, LONG)
        until_running(server)
        answer = post(server, "/pause_generation", mode="in_place")
    assert answer.json() == {"message": "Generation paused successfully.", "status": "ok"}
    newcomer = pool.submit(generate, server, text="miller")
    assert_nothing_moves(server, running, newcomer)
    assert load(server)["num_used_tokens"] > 0
    # Healthy, though not ready for anybody's requests.
    statuses = {
        path: server.client.get(path, timeout=30).status_code
        for path in ("/health", "/ping", "/livez", "/health_generate", "/ready", "/readyz")
    }
    assert statuses == {
        **dict.fromkeys(("/health", "/ping", "/livez", "/health_generate"), 200),
        **dict.fromkeys(("/ready", "/readyz"), 503),
    }
    assert server.client.get("/ready").json()["reason"] == "Generation is paused."
    assert post(server, "/flush_cache").status_code == 400
    answer = post(server, "/continue_generation", torch_empty_cache=True)
    assert answer.json() == {"message": "Generation continued successfully.", "status": "ok"}
    assert running.result()["output_ids"] == expected
    assert newcomer.result()["output_ids"] == expected_short


def test_retract_gives_pages_up_and_goes_on(
    server: ServerProcess, pool: ThreadPoolExecutor
) -> None:
    expected = generate(server, LONG)["output_ids"]
    with slowed(server):
        running = [pool.submit(generate, server, LONG) for _ in range(3)]
        until_running(server, 3)
        assert post(server, "/pause_generation", mode="retract").status_code == 200
    assert_nothing_moves(server, *running)
    assert load(server)["num_running_reqs"] == 0
    assert load(server)["num_waiting_reqs"] == 3
    assert load(server)["num_used_tokens"] == 0
    # Nobody holds a page: the cache and even the pool itself may go.
    assert post(server, "/flush_cache").status_code == 200
    assert post(server, "/release_memory_occupation", tags=["kv_cache"]).status_code == 200
    refused = post(server, "/continue_generation")
    assert refused.status_code == 400
    assert "/resume_memory_occupation" in refused.text
    assert post(server, "/resume_memory_occupation", tags=["kv_cache"]).status_code == 200
    assert post(server, "/continue_generation").status_code == 200
    for future in running:
        assert future.result()["output_ids"] == expected
        assert future.result()["meta_info"]["total_retractions"] == 1


def test_abort_is_the_default(server: ServerProcess, pool: ThreadPoolExecutor) -> None:
    with slowed(server):
        running = [pool.submit(generate, server, LONG) for _ in range(3)]
        until_running(server, 3)
        assert server.client.post("/pause_generation", json={}).status_code == 200
    for future in running:
        meta = future.result(60)["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert 0 < meta["completion_tokens"] < LONG
    newcomer = pool.submit(generate, server)
    assert_nothing_moves(server, newcomer)
    assert post(server, "/continue_generation").status_code == 200
    assert newcomer.result()["meta_info"]["finish_reason"]["type"] == "length"


def test_requests_that_wait_can_be_aborted(server: ServerProcess, pool: ThreadPoolExecutor) -> None:
    assert post(server, "/pause_generation", mode="in_place").status_code == 200
    named = pool.submit(generate, server, rid="held-back")
    others = [pool.submit(generate, server) for _ in range(2)]
    until(lambda: queues(server)["paused"] == 3)
    assert post(server, "/abort_request", rid="unknown").status_code == 200
    assert post(server, "/abort_request", rid="held-back").status_code == 200
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    assert named.result(60)["meta_info"]["finish_reason"] == reason
    assert_nothing_moves(server, *others)
    assert post(server, "/abort_request", abort_all=True).status_code == 200
    for future in others:
        assert future.result(60)["meta_info"]["finish_reason"]["type"] == "abort"


def test_abort_all_returns_what_there_is(server: ServerProcess, pool: ThreadPoolExecutor) -> None:
    with slowed(server):
        running = pool.submit(generate, server, LONG)
        until_running(server)
        assert post(server, "/abort_request", abort_all=True).status_code == 200
    answer = running.result(60)
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted"}
    assert answer["text"]


def test_weights_change_under_a_frozen_request(
    server: ServerProcess, pool: ThreadPoolExecutor
) -> None:
    """The frozen request keeps its pages, and nobody else ever finds them."""
    name = "model.layers.0.mlp.down_proj.weight"
    kept = torch.tensor(post(server, "/get_weights_by_name", name=name, truncate_size=10**6).json())
    prompt = "The miller opens the gate, the wheel turns, and the stones grind wheat. " * 2
    with slowed(server):
        running = pool.submit(generate, server, LONG, text=prompt[:100])
        until_running(server)
        assert post(server, "/pause_generation", mode="in_place").status_code == 200
    update = post(
        server,
        "/update_weights_from_tensor",
        **tensor_body({name: torch.flip(kept, (0,))}),
        weight_version="flipped",
    )
    assert update.json()["success"] is True
    assert post(server, "/continue_generation").status_code == 200
    assert running.result()["meta_info"]["weight_version"] == "flipped"
    warm = generate(server, text=prompt)
    assert warm["meta_info"]["cached_tokens"] == 0, "keys of the old weights were found"
    assert generate(server, text=prompt)["meta_info"]["cached_tokens"] > 0
    body = tensor_body({name: kept})
    assert post(server, "/update_weights_from_tensor", **body).status_code == 200


def test_a_new_version_aborts_unless_told_not_to(
    server: ServerProcess, pool: ThreadPoolExecutor
) -> None:
    for abort, kind in ((None, "abort"), (True, "abort"), (False, "length")):
        fields = {} if abort is None else {"abort_all_requests": abort}
        with slowed(server):
            running = pool.submit(generate, server, LONG)
            until_running(server)
            answer = post(server, "/update_weight_version", new_version="label", **fields)
        assert answer.json() == {
            "success": True,
            "message": "Weight version updated to label",
            "new_version": "label",
        }
        assert running.result()["meta_info"]["finish_reason"]["type"] == kind
    assert generate(server)["meta_info"]["weight_version"] == "label"
    assert post(server, "/update_weight_version").status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", {"mode": "now"}),
        ("/release_memory_occupation", {"tags": ["everything"]}),
        ("/resume_memory_occupation", {"tags": "weights"}),
    ],
)
def test_bad_bodies(path: str, body: dict[str, Any]) -> None:
    server = running_server("qwen3", *ONE_THREAD, "--tp-size", "1")
    assert post(server, path, **body).status_code == 400
    assert server.client.post("/release_memory_occupation").status_code == 400
    assert generate(server)


# ---- memory ----


def test_release_is_refused_while_busy(server: ServerProcess, pool: ThreadPoolExecutor) -> None:
    with slowed(server):
        running = pool.submit(generate, server, LONG)
        until_running(server)
        refused = post(server, "/release_memory_occupation")
    assert refused.status_code == 400
    assert "1 requests are running" in refused.json()["error"]["message"]
    assert running.result()["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights"], ["weights", "kv_cache"]])
def test_what_was_released_comes_back(server: ServerProcess, tags: list[str] | None) -> None:
    expected = generate(server)["output_ids"]
    answer = post(server, "/release_memory_occupation", tags=tags)
    assert answer.status_code == 200
    assert answer.text == "null"
    refused = post(server, "/generate", text="wheel")
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert "/resume_memory_occupation" in refused.text
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    # Twice does no harm.
    assert post(server, "/release_memory_occupation", tags=tags).status_code == 200
    assert post(server, "/resume_memory_occupation", tags=tags).text == "null"
    after = generate(server)
    assert after["output_ids"] == expected
    assert after["meta_info"]["cached_tokens"] == 0


def test_a_trainers_weights_survive_their_release(server: ServerProcess) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    kept = torch.tensor(post(server, "/get_weights_by_name", name=name, truncate_size=10**6).json())
    before = generate(server)["output_ids"]
    body = tensor_body({name: torch.flip(kept, (0,))})
    assert post(server, "/update_weights_from_tensor", **body).status_code == 200
    expected = generate(server)["output_ids"]
    assert expected != before
    assert post(server, "/release_memory_occupation").status_code == 200
    assert post(server, "/get_weights_by_name", name=name).status_code == 400
    assert post(server, "/resume_memory_occupation").status_code == 200
    assert generate(server)["output_ids"] == expected
    body = tensor_body({name: kept})
    assert post(server, "/update_weights_from_tensor", **body).status_code == 200
    assert generate(server)["output_ids"] == before


def test_released_weights_are_replaced_from_disk_at_once() -> None:
    server = running_server("qwen3", *ONE_THREAD, "--tp-size", "1")
    expected = generate(server)["output_ids"]
    assert post(server, "/release_memory_occupation", tags=["weights"]).status_code == 200
    name = "model.norm.weight"
    assert post(server, "/get_weights_by_name", name=name).status_code == 400
    part = post(server, "/update_weights_from_tensor", **tensor_body({name: torch.ones(64)}))
    assert part.status_code == 400
    assert "released" in part.json()["message"]
    path = str(tiny_model("qwen3"))
    assert post(server, "/update_weights_from_disk", model_path=path).json()["success"] is True
    assert generate(server)["output_ids"] == expected


def resident_bytes(server: ServerProcess) -> int:
    """Memory of the worker that is no mapped file."""
    (worker,) = [
        child
        for child in psutil.Process(server.process.pid).children()
        if "scheduler" in child.cmdline()
    ]
    for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def test_memory_really_goes_back_to_the_system(tmp_path: Path) -> None:
    changes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    folder = write_config(tmp_path, vocab_size=512, **changes)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.02
        for name, shape in expected_tensors(folder).items()
    }
    weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder)
    assert weight_bytes > 80e6
    with ServerProcess("--model-path", str(folder), "--dtype", "float32", *ONE_THREAD) as server:
        server.wait_ready()
        expected = generate(server)["output_ids"]
        before = resident_bytes(server)
        assert post(server, "/release_memory_occupation", tags=["weights"]).status_code == 200
        assert before - resident_bytes(server) > 0.8 * weight_bytes
        assert post(server, "/resume_memory_occupation").status_code == 200
        assert generate(server)["output_ids"] == expected
