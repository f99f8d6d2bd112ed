"""A running server takes weights from a trainer: bytes, shared memory, broadcasts; no pickle."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save

from headrace.trainer import SharedTensors, tensor_body
from tests.support.server import ROOT, ServerProcess, free_port, running_server
from tests.support.tiny_models import other_weights, tiny_model

PROMPT = "The miller opens the gate, the wheel turns, and the stones grind wheat."
ONE_THREAD = ("--num-threads", "1", "--random-seed", "1")
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return server.client.post(path, json=body, timeout=60)


def generate(server: ServerProcess) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    answer = post(server, "/generate", text=PROMPT, sampling_params=sampling)
    assert answer.status_code == 200, answer.text
    return answer.json()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


@pytest.fixture(params=[("qwen3", 1), ("llama_biased", 2)], ids=["one-rank", "two-ranks"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, int, ServerProcess]]:
    model, tp_size = request.param
    server = running_server(model, *ONE_THREAD, "--tp-size", str(tp_size))
    yield model, tp_size, server
    path = str(tiny_model(model))
    back = post(server, "/update_weights_from_disk", model_path=path, weight_version="default")
    assert back.status_code == 200


@pytest.fixture
def other(served: tuple[str, int, ServerProcess], tmp_path: Path) -> tuple[Path, list[int]]:
    """Other weights, and what the server answers with them when they come from disk."""
    model, _, server = served
    folder = other_weights(model, tmp_path / "other")
    before = generate(server)["output_ids"]
    assert post(server, "/update_weights_from_disk", model_path=str(folder)).status_code == 200
    expected = generate(server)["output_ids"]
    assert expected != before
    back = post(server, "/update_weights_from_disk", model_path=str(tiny_model(model)))
    assert back.status_code == 200
    assert generate(server)["output_ids"] == before
    return folder, expected


def test_all_weights_as_bytes(
    served: tuple[str, int, ServerProcess], other: tuple[Path, list[int]]
) -> None:
    _, tp_size, server = served
    folder, expected = other
    (entry,) = tensor_body(weights_of(folder))["serialized_named_tensors"]
    for entries in ([entry], [entry] * tp_size):
        answer = post(
            server,
            "/update_weights_from_tensor",
            serialized_named_tensors=entries,
            weight_version=f"bytes-{len(entries)}",
        )
        message = f"Success Weight version updated to bytes-{len(entries)}."
        assert answer.json() == {"success": True, "message": message}
        after = generate(server)
        assert after["output_ids"] == expected
        assert after["meta_info"]["weight_version"] == f"bytes-{len(entries)}"


def test_weights_in_parts_through_shared_memory(
    served: tuple[str, int, ServerProcess], other: tuple[Path, list[int]]
) -> None:
    _, _, server = served
    folder, expected = other
    items = list(weights_of(folder).items())
    assert post(server, "/begin_weight_update", selector="all").json()["success"] is True
    for start in range(0, len(items), 7):
        with SharedTensors(items[start : start + 7]) as shared:
            assert post(server, "/update_weights_from_tensor", **shared.body).status_code == 200
    assert server.client.get("/ready").status_code == 503
    assert post(server, "/begin_weight_update").json()["success"] is False
    assert post(server, "/end_weight_update").json() == {"success": True, "message": "Success"}
    assert post(server, "/end_weight_update").status_code == 400
    after = generate(server)
    assert after["output_ids"] == expected
    assert after["meta_info"]["cached_tokens"] == 0


def test_broadcasts_of_another_process(
    served: tuple[str, int, ServerProcess], other: tuple[Path, list[int]]
) -> None:
    _, tp_size, server = served
    form = "plain" if tp_size == 1 else "flattened"
    folder, expected = other
    script = ROOT / "tests" / "support" / "broadcast_trainer.py"
    arguments = [server.url, str(folder), str(free_port()), str(tp_size), form]
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert all(answer["success"] for answer in answers), answers
    assert answers[-2]["message"] == (
        "Succeeded to update parameter online. Weight version updated to broadcast-1."
    )
    after = generate(server)
    assert after["output_ids"] == expected
    assert after["meta_info"]["weight_version"] == "broadcast-1"


SILENT_TRAINER = """
import sys
from runtime.weights.update_group import create_group

port, world_size = map(int, sys.argv[1:])
group = create_group("127.0.0.1", port, 0, world_size, "weight_update_group", "gloo")
sys.stdin.read()
"""


def test_a_broadcast_that_never_comes_stops_nobody(
    served: tuple[str, int, ServerProcess],
) -> None:
    _, tp_size, server = served
    before = generate(server)["output_ids"]
    world, port = 1 + tp_size, free_port()
    body: dict[str, Any] = {"names": [K_PROJ], "dtypes": ["float32"]}
    body["shapes"] = [list(weights_of(tiny_model(served[0]))[K_PROJ].shape)]
    for timeout in (0, 301):
        answer = post(server, "/update_weights_from_distributed", **body, timeout=timeout)
        assert answer.status_code == 400
        assert "timeout must be in" in answer.json()["message"]
    trainer = subprocess.Popen(
        [sys.executable, "-c", SILENT_TRAINER, str(port), str(world)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
    )
    with trainer, ThreadPoolExecutor(1) as pool:
        group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        joined = post(
            server, "/init_weights_update_group", **group, world_size=world, backend="gloo"
        )
        assert joined.json()["success"], joined.text
        path = "/update_weights_from_distributed"
        waiting = pool.submit(post, server, path, **body, timeout=10.0)
        began = time.monotonic()
        while not waiting.done() and time.monotonic() - began < 3:
            for path in ("/health", "/ready"):
                asked = time.monotonic()
                assert httpx.get(server.url + path, timeout=30).status_code == 200
                assert time.monotonic() - asked < 8
            assert generate(server)["output_ids"] == before
        assert not waiting.done()
        answer = waiting.result(90)
        trainer.communicate()
    assert answer.status_code == 400
    assert answer.json()["message"] == (
        "Failed to update weights: A broadcast of the group 'weight_update_group' failed, and the "
        "group with it: nothing came for 10 s.\nNothing was loaded: the original weights keep "
        "serving."
    )
    assert generate(server)["output_ids"] == before
    gone = post(server, "/update_weights_from_distributed", **body)
    assert "There is no group" in gone.json()["message"]


@pytest.mark.parametrize("name", [K_PROJ, O_PROJ, "model.norm.weight", "lm_head.weight"])
def test_a_weight_can_be_read(served: tuple[str, int, ServerProcess], name: str) -> None:
    model, _, server = served
    held = weights_of(tiny_model(model))
    # Tied: the head is the embeddings.
    tensor = held.get(name, held["model.embed_tokens.weight"])
    for rows in (3, 100, 1000):
        body = {"name": name, "truncate_size": rows}
        answer = httpx.request("GET", server.url + "/get_weights_by_name", json=body)
        assert torch.equal(torch.tensor(answer.json()), tensor[:rows])
    query = server.client.get("/get_weights_by_name", params={"name": name})
    assert torch.equal(torch.tensor(query.json()), tensor[:100])
    # More rows than there are cost nothing.
    body = {"name": name, "truncate_size": 2**62}
    assert torch.equal(torch.tensor(post(server, "/get_weights_by_name", **body).json()), tensor)
    for rows in (0, -1):
        assert (
            post(server, "/get_weights_by_name", name=name, truncate_size=rows).status_code == 400
        )
    answer = post(server, "/get_weights_by_name", name="model.no.such.weight")
    assert answer.status_code == 400
    assert "names are those of the checkpoint" in answer.json()["error"]["message"]


def test_the_checker_sees_what_changed(served: tuple[str, int, ServerProcess]) -> None:
    model, _, server = served

    def check(action: str) -> httpx.Response:
        return post(server, "/weights_checker", action=action)

    expected = generate(server)["output_ids"]
    checksum = check("checksum").json()["message"]
    assert check("snapshot").json()["success"] is True
    assert check("compare").json()["success"] is True
    kept = weights_of(tiny_model(model))[K_PROJ]
    body = tensor_body({K_PROJ: kept + 1})
    assert post(server, "/update_weights_from_tensor", **body).json()["success"] is True
    different = check("compare")
    assert different.status_code == 400
    assert f"1 tensor different from the snapshot ({K_PROJ})" in different.json()["message"]
    assert check("checksum").json()["message"] != checksum
    body = tensor_body({K_PROJ: kept})
    assert post(server, "/update_weights_from_tensor", **body).json()["success"] is True
    assert check("compare").json()["success"] is True
    assert check("checksum").json()["message"] == checksum
    assert check("reset_tensors").json()["success"] is True
    assert check("compare").status_code == 400
    path = str(tiny_model(model))
    assert post(server, "/update_weights_from_disk", model_path=path).status_code == 200
    assert check("compare").json()["success"] is True
    assert generate(server)["output_ids"] == expected
    assert check("what").status_code == 400


def one_server() -> ServerProcess:
    return running_server("qwen3", *ONE_THREAD, "--tp-size", "1")


def _base64(data: bytes) -> list[str]:
    return [base64.b64encode(data).decode()]


def _small(**tensors: torch.Tensor) -> list[str]:
    return _base64(save({name.replace("__", "."): tensor for name, tensor in tensors.items()}))


# An empty list, as Python pickles it.
PICKLE = _base64(b"\x80\x04]\x94.")
REFUSED = {
    "a pickle": ({"serialized_named_tensors": PICKLE}, "is pickled, and nothing is unpickled"),
    "noise": ({"serialized_named_tensors": _base64(b"\1" * 99)}, "is not a safetensors file"),
    "a header that lies": (
        {"serialized_named_tensors": _base64((64).to_bytes(8, "little") + b"{" * 64)},
        "not the bytes of a safetensors file",
    ),
    "no base64": ({"serialized_named_tensors": ["%%"]}, "base64"),
    "nothing": ({}, "Exactly one form of tensors is needed"),
    "two forms": (
        {"serialized_named_tensors": PICKLE, "shared_memory": "x"},
        "Exactly one form of tensors is needed",
    ),
    "too many entries": ({"serialized_named_tensors": PICKLE * 3}, "must have one entry"),
    "a custom loader": ({"load_format": "my.loader"}, "'my.loader' is not supported"),
    "an unknown name": (
        {"serialized_named_tensors": _small(model__nothing=torch.zeros(2))},
        "1 tensor unknown (model.nothing)",
    ),
    "a wrong shape": (
        {"serialized_named_tensors": _small(model__norm__weight=torch.zeros(2))},
        "model.norm.weight is [2], expected [64]",
    ),
    "integers": (
        {"serialized_named_tensors": _small(model__norm__weight=torch.zeros(64).int())},
        "expected a floating type",
    ),
    "memory elsewhere": ({"shared_memory": "../etc/passwd"}, "is not a name in /dev/shm"),
    "no memory": ({"shared_memory": "headrace-none"}, "there is no /dev/shm/headrace-none"),
    "a GPU that is not there": ({"cuda_ipc": [[]]}, "on the CPU"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_weight_is_refused(kind: str) -> None:
    server = one_server()
    expected = generate(server)["output_ids"]
    body, reason = REFUSED[kind]
    answer = post(server, "/update_weights_from_tensor", **body)
    assert answer.status_code == 400
    assert reason in answer.json()["message"]
    assert generate(server)["output_ids"] == expected


def test_one_bad_tensor_keeps_out_the_good_ones() -> None:
    server = one_server()
    good = weights_of(tiny_model("qwen3"))[K_PROJ] + 1
    assert post(server, "/weights_checker", action="snapshot").status_code == 200
    body = tensor_body({K_PROJ: good, "model.norm.weight": torch.zeros(3)})
    answer = post(server, "/update_weights_from_tensor", **body)
    assert answer.status_code == 400
    assert "original weights keep serving" in answer.json()["message"]
    assert post(server, "/weights_checker", action="compare").status_code == 200


GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
TENSOR = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/init_weights_update_group", GROUP, "backend 'nccl' needs a GPU"),
        ("/init_weights_update_group", GROUP | {"backend": "mpi"}, "not one of nccl, gloo"),
        ("/init_weights_update_group", GROUP | {"world_size": 1}, "do not fit a world of 1"),
        ("/init_weights_update_group", GROUP | {"master_port": 0}, "must be in [1, 65535]"),
        ("/update_weights_from_ipc", {"zmq_handles": {}}, "is not supported"),
        ("/destroy_weights_update_group", {}, "There is no group 'weight_update_group'"),
        ("/update_weights_from_distributed", TENSOR, "There is no group"),
        ("/update_weights_from_distributed", TENSOR | {"dtypes": []}, "must be of one length"),
        ("/update_weights_from_distributed", TENSOR | {"dtypes": ["complex64"]}, "is not one of"),
        ("/update_weights_from_distributed", TENSOR | {"names": ["x"]}, "1 tensor unknown (x)"),
        ("/update_weights_from_distributed", TENSOR | {"shapes": [[2**40]]}, "wrong shape"),
        ("/update_weights_from_distributed", TENSOR | {"selector": "draft"}, "no draft model"),
        ("/update_weights_from_distributed", TENSOR | {"load_format": "x"}, "flattened_bucket"),
    ],
)
def test_groups_that_cannot_be(path: str, body: dict[str, Any], reason: str) -> None:
    answer = post(one_server(), path, **body)
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert reason in answer.json()["message"]


def test_requests_are_served_while_a_group_waits_for_its_trainer() -> None:
    server = one_server()
    body = GROUP | {"backend": "gloo", "master_port": free_port(), "group_name": "late"}
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(post, server, "/init_weights_update_group", **body)
        time.sleep(0.5)
        assert generate(server)["output_ids"]
        assert not joining.done()
        left = post(server, "/destroy_weights_update_group", group_name="late")
        assert left.json()["success"] is True
        assert joining.result().json()["success"] is False


def test_a_trainer_that_is_not_there_is_waited_for_no_longer_than_asked() -> None:
    server = one_server()
    group = GROUP | {"backend": "gloo", "group_name": "nobody", "timeout": 2}
    for _ in range(2):
        started_at = time.monotonic()
        # The name is free again after each time.
        body = group | {"master_port": free_port()}
        answer = post(server, "/init_weights_update_group", **body)
        assert answer.status_code == 400
        assert answer.json()["success"] is False
        assert "Failed to initialize" in answer.json()["message"]
        assert time.monotonic() - started_at < 20
        assert generate(server)["output_ids"]
    for timeout in (0, -1, 301):
        answer = post(server, "/init_weights_update_group", **group | {"timeout": timeout})
        assert "timeout must be in" in answer.json()["message"]
