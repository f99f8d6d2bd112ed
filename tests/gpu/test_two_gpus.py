"""Two GPUs: a copy of the model on each, or each layer shared by both, under updates and releases.

Each GPU has one process. The same tests run on the CPU on request, with as many processes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import headrace as sgl
from benchmarks.h200.tensor_parallel import NUM_PROMPTS, NUM_SHARING
from headrace.trainer import broadcast_weights, describe_tensors, init_update_group, tensor_body
from tests.support.engine import InProcessEngine
from tests.support.gpu import DEVICE, on_gpu, prompt
from tests.support.server import ServerProcess, free_port
from tests.support.tiny_models import other_weights, tiny_model

pytestmark = [pytest.mark.multi_gpu, pytest.mark.also_cpu(asked=True)]

MODEL = "llama_biased"
PROMPTS = [prompt(n, n) for n in (6, 40, 90, 150)] * 2
NUM_NEW = 24
GREEDY = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
# On a GPU 300 MB of pages a copy of the model, or 150 on each GPU where both share it.
NUM_TOKENS = 400_000 if DEVICE == "cuda" else 8192
PAGE_BYTES = NUM_TOKENS * 3 * 2 * 2 * 16 * 4


@cache
def expected(folder: Path) -> list[list[int]]:
    """What one GPU answers by itself, one request after the other and without graphs."""
    engine = InProcessEngine(folder, device=DEVICE, disable_cuda_graph=True)
    return [engine.generate(ids, NUM_NEW, ignore_eos=True) for ids in PROMPTS]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_weights(MODEL, tmp_path_factory.mktemp("other") / MODEL)


def used_bytes() -> list[int]:
    """What anybody holds of each GPU."""
    if DEVICE == "cpu":
        return []
    torch.cuda.empty_cache()
    memory = [torch.cuda.mem_get_info(index) for index in range(2)]
    return [total - free for free, total in memory]


def assert_fell(before: list[int], after: list[int], by: float) -> None:
    for index, (more, less) in enumerate(zip(before, after, strict=True)):
        assert more - less > by, f"GPU {index}"


# ---- a copy of the model on each ----------------------------------------------------------------


def test_a_copy_on_each(other: Path) -> None:
    options = ("--dp-size", "2", "--device", DEVICE, "--dtype", "float32")
    limits = ("--max-total-tokens", str(NUM_TOKENS), "--max-running-requests", "16")
    seeds = ("--random-seed", "1", "--num-threads", "1")
    folder = tiny_model(MODEL)
    # This process computes them on the first GPU: before anybody's memory is counted.
    wanted_first, wanted_other = expected(folder), expected(other)
    at_first = used_bytes()
    with ServerProcess("--model-path", str(folder), *options, *limits, *seeds) as server:
        server.wait_ready(180)
        serving = used_bytes()
        assert_fell(serving, at_first, 0.95 * PAGE_BYTES)

        def post(path: str, **body: Any) -> httpx.Response:
            return httpx.post(server.url + path, json=body, timeout=120)

        def ask(ids: list[int], rank: int | None = None) -> dict[str, Any]:
            body = {"input_ids": ids, "sampling_params": GREEDY, "data_parallel_rank": rank}
            answer = post("/generate", **body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def check(wanted: list[list[int]]) -> None:
            """Of both, each asked by itself; then of whoever is free."""
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                for rank in (0, 1, None):
                    found = list(pool.map(ask, PROMPTS, [rank] * len(PROMPTS)))
                    assert [each["output_ids"] for each in found] == wanted
                    used = {each["meta_info"]["dp_rank"] for each in found}
                    assert rank is None or used == {rank}

        check(wanted_first)
        body = {"model_path": str(other), "weight_version": "2"}
        assert post("/update_weights_from_disk", **body).json()["success"]
        for rank in (0, 1):
            answer = ask(PROMPTS[3], rank)
            assert answer["meta_info"]["cached_tokens"] == 0
            assert answer["meta_info"]["weight_version"] == "2"
        check(wanted_other)
        refused = post("/update_weights_from_tensor", **tensor_body({"x": torch.ones(1)}))
        assert refused.status_code == 400
        assert "--dp-size" in refused.json()["message"]
        for _ in range(2):
            assert post("/release_memory_occupation").status_code == 200
            assert_fell(serving, used_bytes(), 0.9 * PAGE_BYTES)
            assert post("/generate", input_ids=PROMPTS[0]).status_code == 503
            assert post("/resume_memory_occupation").status_code == 200
            check(expected(other))
        assert post("/flush_cache").status_code == 200
        for rank in (0, 1):
            assert ask(PROMPTS[3], rank)["meta_info"]["cached_tokens"] == 0
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0, server.log


# ---- each layer shared by both -------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine(
        model_path=str(tiny_model(MODEL)),
        device=DEVICE,
        dtype="float32",
        tp_size=2,
        max_total_tokens=NUM_TOKENS,
        max_running_requests=16,
        num_threads=1,
        random_seed=1,
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
def first_weights(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine: sgl.Engine = request.getfixturevalue("engine")
        assert engine.update_weights_from_disk(str(tiny_model(MODEL)))[0]


def answers(engine: sgl.Engine) -> list[list[int]]:
    return [
        each["output_ids"] for each in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    ]


def test_both_compute_what_one_does(engine: sgl.Engine) -> None:
    for _ in range(2):
        assert answers(engine) == expected(tiny_model(MODEL))
    sampled = {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 40, "ignore_eos": True}
    first, second = (
        engine.generate(input_ids=PROMPTS[1], sampling_params=sampled)["output_ids"]
        for _ in range(2)
    )
    assert first == second


def test_an_update_from_disk(engine: sgl.Engine, other: Path) -> None:
    assert engine.update_weights_from_disk(str(other))[0]
    assert answers(engine) == expected(other)
    assert not engine.update_weights_from_disk("/no/such/folder")[0]
    assert answers(engine) == expected(other)


@pytest.mark.parametrize(
    "place",
    ["cpu", pytest.param("cuda:0", marks=on_gpu), pytest.param("cuda:1", marks=on_gpu)],
)
def test_an_update_from_a_trainers_memory(engine: sgl.Engine, other: Path, place: str) -> None:
    tensors = {
        name: tensor.to(place) for name, tensor in load_file(other / "model.safetensors").items()
    }
    items = list(tensors.items())
    # In two calls, which cut fused layers.
    for part in (items[0::2], items[1::2]):
        assert engine.update_weights_from_tensor(part) == (True, "Success")
    assert answers(engine) == expected(other)
    # Cut among the ranks by rows, by columns, and not at all.
    for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "norm"):
        full_name = f"model.{name}.weight"
        held = torch.tensor(engine.get_weights_by_name(full_name, truncate_size=50))
        assert torch.equal(held, tensors[full_name][:50].cpu())
    success, message = engine.update_weights_from_tensor({"model.norm.weight": torch.ones(3)})
    assert not success
    assert "expected [64]" in message
    assert answers(engine) == expected(other)


@pytest.mark.parametrize("flattened", [False, True])
def test_an_update_by_broadcast(engine: sgl.Engine, other: Path, flattened: bool) -> None:
    tensors = load_file(other / "model.safetensors")
    port, told = free_port(), []

    def serve() -> None:
        told.append(engine.init_weights_update_group("127.0.0.1", port, 1, 3, "g", backend="gloo"))
        body = describe_tensors(tensors)
        form = "flattened_bucket" if flattened else None
        told.append(
            engine.update_weights_from_distributed(**body, group_name="g", load_format=form)
        )
        told.append(engine.destroy_weights_update_group("g"))

    thread = threading.Thread(target=serve)
    thread.start()
    group = init_update_group("127.0.0.1", port, 3, "g", "gloo")
    broadcast_weights(tensors, group, flattened=flattened)
    thread.join(60)
    dist.destroy_process_group(group)
    assert [success for success, _ in told] == [True, True, True], told
    assert answers(engine) == expected(other)


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="NCCL wants a GPU for each of three")
def test_an_update_by_broadcast_from_a_third_gpu(engine: sgl.Engine, other: Path) -> None:
    tensors = {
        name: tensor.to("cuda:2") for name, tensor in load_file(other / "model.safetensors").items()
    }
    port, told = free_port(), []

    def serve() -> None:
        told.append(engine.init_weights_update_group("127.0.0.1", port, 1, 3, "n", backend="nccl"))
        body = describe_tensors(tensors)
        told.append(engine.update_weights_from_distributed(**body, group_name="n"))
        told.append(engine.destroy_weights_update_group("n"))

    with torch.cuda.device(2):
        thread = threading.Thread(target=serve)
        thread.start()
        group = init_update_group("127.0.0.1", port, 3, "n", "nccl")
        broadcast_weights(tensors, group)
        thread.join(60)
        dist.destroy_process_group(group)
    assert [success for success, _ in told] == [True, True, True], told
    assert answers(engine) == expected(other)


@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"], ["cuda_graph"]])
def test_memory_goes_back_and_comes_again(engine: sgl.Engine, tags: list[str] | None) -> None:
    answers(engine)
    before = used_bytes()
    engine.release_memory_occupation(tags)
    if tags in (None, ["kv_cache"]):
        assert_fell(before, used_bytes(), 0.9 * PAGE_BYTES / 2)
    engine.resume_memory_occupation(tags)
    assert answers(engine) == expected(tiny_model(MODEL))


def test_a_trainers_way_through_a_step(engine: sgl.Engine, other: Path) -> None:
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights"])
    assert engine.update_weights_from_tensor(load_file(other / "model.safetensors"))[0]
    engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
    assert answers(engine) == expected(other)
    # Weights that no file holds: each rank keeps its part on the host.
    engine.release_memory_occupation()
    engine.resume_memory_occupation()
    assert answers(engine) == expected(other)


def test_many_who_begin_alike(tmp_path: Path) -> None:
    """So many that both read their common beginning once."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.h200.tensor_parallel", "--shape", "tiny"]
    options = ["--tp", "1", "2", "--device", DEVICE, "--json", str(result)]
    subprocess.run([*command, *options], check=True, timeout=240)
    found = json.loads(result.read_text())
    assert len(found["tiny tp1"]["tokens"]) == NUM_PROMPTS + NUM_SHARING
    assert found["tiny tp2"]["tokens"] == found["tiny tp1"]["tokens"]
