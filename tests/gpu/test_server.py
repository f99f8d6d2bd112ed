"""A real server on the GPU, from its launch line to SIGTERM, and a trainer beside it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from headrace.trainer import (
    CudaTensors,
    SharedTensors,
    broadcast_weights,
    describe_tensors,
    init_update_group,
    tensor_body,
)
from tests.support.engine import InProcessEngine
from tests.support.gpu import DEVICE, on_gpu, prompt
from tests.support.grammar_backends import needs_grammars
from tests.support.native import slowed, stream
from tests.support.server import ServerProcess, free_port
from tests.support.tiny_models import other_weights, tiny_model

pytestmark = pytest.mark.also_cpu(asked=True)

MODEL = "llama"
# On a GPU 300 MB of pages, which show when they are given back.
NUM_TOKENS = 400_000 if DEVICE == "cuda" else 8192
OPTIONS = (
    *("--device", DEVICE),
    *("--dtype", "float32"),
    *("--max-total-tokens", str(NUM_TOKENS)),
    *("--max-running-requests", "32"),
    *("--random-seed", "1"),
    *("--num-threads", "1"),
)
PROMPTS = [prompt(n, n) for n in (6, 40, 90, 150)]
NUM_NEW = 24


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model-path", str(tiny_model(MODEL)), *OPTIONS) as server:
        yield server.wait_ready(180)
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0, server.log


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_weights(MODEL, tmp_path_factory.mktemp("other") / MODEL)


@cache
def expected(folder: Path) -> list[list[int]]:
    """What a fresh engine answers, one request after the other and without graphs."""
    engine = InProcessEngine(folder, device=DEVICE, disable_cuda_graph=True)
    return [engine.generate(ids, NUM_NEW, ignore_eos=True) for ids in PROMPTS]


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120)


def done(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(server: ServerProcess, ids: list[int], **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling} | more
    return done(post(server, "/generate", **body))


def answers(server: ServerProcess) -> list[list[int]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [each["output_ids"] for each in pool.map(lambda ids: ask(server, ids), PROMPTS)]


@pytest.fixture
def first_weights(server: ServerProcess) -> Iterator[None]:
    yield
    path = str(tiny_model(MODEL))
    assert done(post(server, "/update_weights_from_disk", model_path=path))["success"]


def test_answers_are_those_of_an_engine_without_graphs(server: ServerProcess) -> None:
    assert answers(server) == expected(tiny_model(MODEL))
    info = done(httpx.get(server.url + "/get_server_info"))
    assert (info["device"], info["dtype"]) == (DEVICE, "float32")


def test_a_stream_says_the_same(server: ServerProcess) -> None:
    ids = PROMPTS[1]
    whole = ask(server, ids, return_logprob=True)
    sampling = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    # Pieces that wait for the front are joined; slow steps leave it time for each.
    with slowed(server):
        events = stream(server, **body)
    assert len(events) > NUM_NEW // 2
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["text"] == whole["text"]
    found, wanted = (
        [value for value, *_ in each["meta_info"]["output_token_logprobs"]]
        for each in (events[-1], whole)
    )
    assert found == pytest.approx(wanted, abs=1e-3)


def test_the_prefix_cache_is_used_and_flushed(server: ServerProcess) -> None:
    ids = prompt(100, 77)
    assert ask(server, ids)["meta_info"]["cached_tokens"] == 0
    assert ask(server, ids)["meta_info"]["cached_tokens"] == 96
    assert post(server, "/flush_cache").status_code == 200
    assert ask(server, ids)["meta_info"]["cached_tokens"] == 0


@needs_grammars
def test_an_answer_follows_a_regex(server: ServerProcess) -> None:
    params = {"max_new_tokens": 8, "temperature": 1.0, "regex": "[0-9]{4}"}
    answer = ask(server, PROMPTS[0], sampling_params=params)
    assert len(answer["text"]) == 4
    assert answer["text"].isdigit()


@pytest.mark.usefixtures("first_weights")
@pytest.mark.parametrize("form", ["disk", "bytes", "shared memory"])
def test_other_weights(server: ServerProcess, other: Path, form: str) -> None:
    ask(server, PROMPTS[2])
    tensors = load_file(other / "model.safetensors")
    if form == "disk":
        done(post(server, "/update_weights_from_disk", model_path=str(other)))
    elif form == "bytes":
        done(post(server, "/update_weights_from_tensor", **tensor_body(tensors)))
    else:
        with SharedTensors(tensors) as shared:
            done(post(server, "/update_weights_from_tensor", **shared.body))
    assert ask(server, PROMPTS[2])["meta_info"]["cached_tokens"] == 0
    assert answers(server) == expected(other)


@on_gpu
@pytest.mark.usefixtures("first_weights")
def test_weights_from_the_memory_of_the_gpu(server: ServerProcess, other: Path) -> None:
    tensors = [(name, t.cuda()) for name, t in load_file(other / "model.safetensors").items()]
    done(post(server, "/begin_weight_update"))
    # In two calls, which cut fused layers.
    for part in (tensors[0::2], tensors[1::2]):
        with CudaTensors(part) as lent:
            done(post(server, "/update_weights_from_tensor", **lent.body))
    done(post(server, "/end_weight_update"))
    assert answers(server) == expected(other)


@on_gpu
def test_handles_that_lead_nowhere_are_refused(server: ServerProcess) -> None:
    before = answers(server)
    with CudaTensors({"model.norm.weight": torch.ones(64, device="cuda")}) as lent:
        ((handle,),) = lent.body["cuda_ipc"]
        outside = [[["model.norm.weight", "float32", [64]], 10**9]]
        wrong = [
            ({"device_uuid": "GPU-none"}, "does not see the GPU"),
            ({"tensors": outside}, "does not lie in its memory"),
            ({"tensors": [[["nobody", "float32", [1]], 0]]}, "1 tensor unknown (nobody)"),
        ]
        for change, reason in wrong:
            body = {"cuda_ipc": [[handle | change]]}
            answer = post(server, "/update_weights_from_tensor", **body)
            assert answer.status_code == 400
            assert reason in answer.json()["message"]
    assert answers(server) == before


class Group:
    """This process as the trainer: rank 0 of a group with the server."""

    def __init__(self, server: ServerProcess, backend: str) -> None:
        self.server = server
        self.pool = ThreadPoolExecutor(1)
        port = free_port()
        joining = self._post(
            "/init_weights_update_group",
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=2,
            backend=backend,
        )
        self.group = init_update_group("127.0.0.1", port, 2, backend=backend)
        done(joining.result())

    def _post(self, path: str, **body: Any) -> Future[httpx.Response]:
        return self.pool.submit(post, self.server, path, **body)

    def send(
        self, tensors: list[tuple[str, torch.Tensor]], *, flattened: bool = False
    ) -> httpx.Response:
        form = "flattened_bucket" if flattened else None
        updating = self._post(
            "/update_weights_from_distributed", **describe_tensors(tensors), load_format=form
        )
        try:
            broadcast_weights(tensors, self.group, flattened=flattened)
        except RuntimeError as error:
            print(error)
        return updating.result()

    def leave(self) -> None:
        dist.destroy_process_group(self.group)
        self.pool.shutdown()


def check_broadcasts(server: ServerProcess, group: Group, tensors: dict[str, Any]) -> None:
    items = list(tensors.items())
    # In two calls, which cut fused layers, each in another form.
    done(group.send(items[0::2]))
    done(group.send(items[1::2], flattened=True))


@pytest.mark.usefixtures("first_weights")
def test_broadcasts_over_the_host(server: ServerProcess, other: Path) -> None:
    group = Group(server, "gloo")
    check_broadcasts(server, group, load_file(other / "model.safetensors"))
    assert answers(server) == expected(other)
    # The trainer is still there; nobody waits for it.
    done(post(server, "/destroy_weights_update_group"))
    assert answers(server) == expected(other)
    group.leave()


@on_gpu
@pytest.mark.usefixtures("first_weights")
def test_nccl_refuses_two_ranks_on_one_gpu(server: ServerProcess, other: Path) -> None:
    tensors = load_file(other / "model.safetensors")
    group = Group(server, "nccl")
    answer = group.send([(name, t.to("cuda:0")) for name, t in tensors.items()])
    assert answer.status_code == 400
    assert "failed, and the group with it" in answer.json()["message"]
    assert answers(server) == expected(tiny_model(MODEL))
    group.leave()
    # By the same name another one is met, over the host.
    group = Group(server, "gloo")
    check_broadcasts(server, group, tensors)
    done(post(server, "/destroy_weights_update_group"))
    group.leave()
    assert answers(server) == expected(other)


@on_gpu
@pytest.mark.multi_gpu
@pytest.mark.usefixtures("first_weights")
def test_broadcasts_from_the_next_gpu(server: ServerProcess, other: Path) -> None:
    tensors = load_file(other / "model.safetensors")
    with torch.cuda.device(1):
        for _ in range(2):
            group = Group(server, "nccl")
            check_broadcasts(server, group, {name: t.cuda() for name, t in tensors.items()})
            assert answers(server) == expected(other)
            # Answered at once, though the trainer leaves later.
            done(post(server, "/destroy_weights_update_group"))
            assert answers(server) == expected(other)
            group.leave()


@on_gpu
@pytest.mark.multi_gpu
@pytest.mark.usefixtures("first_weights")
def test_weights_from_the_memory_of_the_next_gpu(server: ServerProcess, other: Path) -> None:
    tensors = load_file(other / "model.safetensors")
    with CudaTensors({name: t.to("cuda:1") for name, t in tensors.items()}) as lent:
        done(post(server, "/update_weights_from_tensor", **lent.body))
    assert answers(server) == expected(other)


@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights"]])
def test_memory_goes_back_and_comes_again(server: ServerProcess, tags: list[str] | None) -> None:
    before = used_bytes()
    body = {} if tags is None else {"tags": tags}
    assert post(server, "/release_memory_occupation", **body).status_code == 200
    if DEVICE == "cuda" and tags != ["weights"]:
        assert before - used_bytes() > 0.9 * NUM_TOKENS * 3 * 2 * 2 * 16 * 4
    assert post(server, "/generate", input_ids=PROMPTS[0]).status_code == 503
    assert post(server, "/resume_memory_occupation", **body).status_code == 200
    assert ask(server, PROMPTS[3])["meta_info"]["cached_tokens"] == 0
    assert answers(server) == expected(tiny_model(MODEL))


def used_bytes() -> int:
    """What anybody holds of the first GPU."""
    if DEVICE == "cpu":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def test_a_body_that_makes_no_sense_leaves_the_worker_alone(server: ServerProcess) -> None:
    pids = server.child_pids()
    tensors = {"model.norm.weight": torch.zeros(3)}
    assert post(server, "/update_weights_from_tensor", **tensor_body(tensors)).status_code == 400
    assert post(server, "/update_weights_from_disk", model_path="/no/such").status_code == 400
    assert post(server, "/weights_checker", action="what").status_code == 400
    name = {"name": "lm_head.weight", "truncate_size": 3}
    held = done(httpx.request("GET", server.url + "/get_weights_by_name", json=name))
    wanted = load_file(tiny_model(MODEL) / "model.safetensors")["lm_head.weight"][:3]
    assert torch.equal(torch.tensor(held), wanted)
    assert server.child_pids() == pids
    assert answers(server) == expected(tiny_model(MODEL))
