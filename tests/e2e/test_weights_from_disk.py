"""A running server takes other weights from disk: whole, or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.checkpoint.weight_roots import WeightRoots, default_root, own_names
from runtime.errors import StartupError
from tests.support.native import queues, slowed, until_running
from tests.support.server import ServerProcess, running_server
from tests.support.tiny_models import copy_of, edit_json, other_weights, tiny_model
from tests.support.waiting import until

SUCCEEDED = "Succeeded to update model weights."
PROMPT = "The miller opens the gate, the wheel turns, and the stones grind wheat, barley and oats."
ONE_THREAD = ("--num-threads", "1", "--random-seed", "1")


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return server.client.post(path, json=body, timeout=60)


def generate(server: ServerProcess, num: int = 16, text: str = PROMPT) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": num, "ignore_eos": True}
    answer = post(server, "/generate", text=text, sampling_params=sampling)
    assert answer.status_code == 200, answer.text
    return answer.json()


def load(server: ServerProcess, path: Path, **options: Any) -> httpx.Response:
    return post(server, "/update_weights_from_disk", model_path=str(path), **options)


def model_info(server: ServerProcess) -> dict[str, Any]:
    return server.client.get("/get_model_info").json()


# Tied embeddings; then biases, and each rank of two with its own part.
@pytest.fixture(
    params=[("qwen3", 1), ("llama_biased", 2)],
    ids=["one-rank", "two-ranks"],
    scope="module",
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, ServerProcess]]:
    model, tp_size = request.param
    server = running_server(model, *ONE_THREAD, "--tp-size", str(tp_size))
    yield model, server
    assert load(server, tiny_model(model), weight_version="default").status_code == 200


@pytest.fixture(scope="module")
def replaced(
    served: tuple[str, ServerProcess], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int]]:
    """Other weights for the served model, and what a fresh server answers with them."""
    model, _ = served
    folder = other_weights(model, tmp_path_factory.mktemp("other") / model)
    with ServerProcess("--model-path", str(folder), *ONE_THREAD) as fresh:
        return folder, generate(fresh.wait_ready())["output_ids"]


def test_the_same_path_changes_nothing(served: tuple[str, ServerProcess]) -> None:
    model, server = served
    before = generate(server)
    answer = load(server, tiny_model(model))
    assert answer.status_code == 200
    assert answer.json() == {"success": True, "message": SUCCEEDED, "num_paused_requests": 0}
    after = generate(server)
    assert after["output_ids"] == before["output_ids"]
    # Not even a prefix is taken over.
    assert after["meta_info"]["cached_tokens"] == 0
    assert generate(server)["meta_info"]["cached_tokens"] > 0


def test_other_weights_answer_as_a_fresh_server(
    served: tuple[str, ServerProcess], replaced: tuple[Path, list[int]]
) -> None:
    model, server = served
    folder, expected = replaced
    before = generate(server)["output_ids"]
    assert before != expected, "the test needs weights that answer differently"
    answer = load(server, folder, weight_version="step-7").json()
    assert answer["message"] == f"{SUCCEEDED} Weight version updated to step-7."
    after = generate(server)
    assert after["output_ids"] == expected
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["meta_info"]["weight_version"] == "step-7"
    assert model_info(server)["model_path"] == str(folder)
    assert model_info(server)["weight_version"] == "step-7"
    (card,) = server.client.get("/v1/models").json()["data"]
    assert card["id"] == str(folder)
    chat = post(server, "/v1/completions", model="any", prompt=PROMPT, max_tokens=1).json()
    assert chat["metadata"]["weight_version"] == "step-7"
    assert load(server, tiny_model(model)).status_code == 200
    assert generate(server)["output_ids"] == before


def _cut(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def _drop(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"))
    tensors = load_file(path)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, path)


def _reshape(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"))
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = torch.cat([tensors[name], tensors[name]])
    save_file(tensors, path)


def _integers(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"))
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].to(torch.int32)
    save_file(tensors, path)


def _another_rope(folder: Path) -> None:
    edit_json(folder / "config.json", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})


def _garbage(folder: Path) -> None:
    max(folder.glob("*.safetensors")).write_bytes(b"\x07" * 4096)


def _empty(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


BROKEN = {
    "truncated": (_cut, "Failed to get weights iterator: ", "is truncated"),
    "garbage": (_garbage, "Failed to get weights iterator: ", "not a safetensors file"),
    "no weights": (_empty, "Failed to get weights iterator: ", "has no weights"),
    "missing": (_drop, "Failed to update weights: ", "1 tensor missing"),
    "shape": (_reshape, "Failed to update weights: ", "1 tensor of the wrong shape"),
    "type": (_integers, "Failed to update weights: ", "not of a floating type"),
    "another model": (_another_rope, "Failed to update weights: ", "another model"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_does_not_fit_leaves_the_old_weights(
    served: tuple[str, ServerProcess], tmp_path: Path, kind: str
) -> None:
    model, server = served
    expected = generate(server)["output_ids"]
    version = model_info(server)["weight_version"]
    damage, prefix, reason = BROKEN[kind]
    folder = copy_of(model, tmp_path / "broken")
    damage(folder)
    answer = load(server, folder, weight_version="never")
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert answer.json()["message"].startswith(prefix)
    assert reason in answer.json()["message"]
    after = generate(server)
    assert after["output_ids"] == expected
    assert after["meta_info"]["weight_version"] == version
    assert model_info(server)["model_path"] == str(tiny_model(model))


def test_tensors_that_nothing_needs_are_one_warning(
    served: tuple[str, ServerProcess], tmp_path: Path
) -> None:
    model, server = served
    expected = generate(server)["output_ids"]
    folder = copy_of(model, tmp_path / "trained")
    _add(folder, **{"v_head.summary.weight": torch.ones(1, 64), "score.weight": torch.ones(2, 64)})
    num_lines = len(server.lines)
    answer = load(server, folder)
    assert answer.status_code == 200, answer.text
    assert generate(server)["output_ids"] == expected
    told = [line for line in server.lines[num_lines:] if "unused" in line]
    assert len(told) == 1
    assert "2 tensors unused (score.weight, v_head.summary.weight)" in told[0]
    assert load(server, tiny_model(model)).status_code == 200


def test_a_head_that_the_server_has_no_place_for_is_refused(tmp_path: Path) -> None:
    server = running_server("qwen3", *ONE_THREAD, "--tp-size", "1")
    expected = generate(server)["output_ids"]
    folder = copy_of("qwen3", tmp_path / "untied")
    _add(folder, **{"lm_head.weight": torch.ones(512, 64)})
    answer = load(server, folder)
    assert answer.status_code == 400
    assert "tie_word_embeddings is False, not True" in answer.json()["message"]
    (folder / "config.json").unlink()
    assert load(server, folder).status_code == 400
    assert generate(server)["output_ids"] == expected


def _add(folder: Path, **tensors: torch.Tensor) -> None:
    path = max(folder.glob("*.safetensors"))
    save_file({**load_file(path), **tensors}, path)


def test_a_repository_that_does_not_exist() -> None:
    server = running_server("qwen3", *ONE_THREAD, "--tp-size", "1")
    name = "qwen/qwen2.5-0.5b-instruct-wrong"
    answer = post(server, "/update_weights_from_disk", model_path=name)
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert (
        answer.json()["message"]
        == f"Failed to get weights iterator: {name} (repository not found)."
    )
    assert generate(server)["output_ids"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "model_path"),
        ({"model_path": 3}, "Expected `str`"),
        ({"model_path": "x", "load_format": "pt"}, "not one of auto, safetensors, dummy"),
        ({"model_path": "x", "is_async": True}, "is_async is not supported"),
        ({"model_path": "x", "manifest": {}}, "manifest is not supported"),
        ({"model_path": "/tmp/nowhere/at/all"}, "is not a folder"),
        ({"model_path": "/nowhere/at/all"}, "lies in none of the folders"),
        ({"model_path": "/tmp/../etc"}, "lies in none of the folders"),
        ({"model_path": ""}, "an empty path is not a folder"),
        ({"model_path": "x" * 5000}, "is not a folder: its name has 5000 characters"),
        ({"model_path": "/tmp/" + "x" * 300}, "is not a folder: File name too long"),
        ({"model_path": "a\0b"}, "is not a folder"),
        ({"model_path": "~nobody-has-this-name"}, "is not a folder"),
    ],
)
def test_bad_bodies(body: dict[str, Any], reason: str) -> None:
    server = running_server("qwen3", *ONE_THREAD, "--tp-size", "1")
    answer = post(server, "/update_weights_from_disk", **body)
    assert answer.status_code == 400
    assert reason in answer.text


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [10**400, "x" * 5000], ids=["integer", "text"])
def test_absurd_values_of_a_configuration(tmp_path: Path, name: str, value: object) -> None:
    server = running_server("qwen3", *ONE_THREAD, "--tp-size", "1")
    folder = copy_of("qwen3", tmp_path / "absurd")
    edit_json(folder / "config.json", **{name: value})
    answer = load(server, folder)
    assert answer.status_code == 400, answer.text
    assert name in answer.json()["message"]
    assert len(answer.text) < 1000


def test_weights_come_from_listed_folders_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    allowed.mkdir()
    good = copy_of("qwen3", allowed / "good")
    copy_of("qwen3", outside)
    (allowed / "link").symlink_to(outside)
    (tmp_path / "way").symlink_to(allowed)
    roots = WeightRoots((str(tmp_path / "way"), "/no/such/root"))
    assert roots.find(str(good)) == good
    assert roots.find(f"{tmp_path}/way/good") == tmp_path / "way" / "good"
    # A link in a root that the operator made leads inside.
    assert roots.find(f"{tmp_path}/way/link") == tmp_path / "way" / "link"
    # `..` is taken off the name: to the system this would be the one beside `outside`.
    copy_of("qwen3", tmp_path / "good")
    assert roots.find(f"{tmp_path}/way/link/../good") == tmp_path / "way" / "good"
    monkeypatch.chdir(allowed)
    assert roots.find("link/../good") == Path("good")
    for path in (f"{tmp_path}/way/link/../outside", "link/../outside"):
        with pytest.raises(StartupError, match=r"not a folder|no such local folder"):
            roots.find(path)
    for path in (outside, f"{allowed}/../outside", "../outside", "/", tmp_path, "/etc/passwd"):
        with pytest.raises(StartupError, match="--weights-root"):
            roots.find(str(path))
    # Where everything may be fetched, folders are still those that are listed.
    with pytest.raises(StartupError, match="--weights-root"):
        WeightRoots((str(allowed),), may_download=True).find(str(outside))


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's link takes the superuser")
def test_a_link_that_another_user_made_does_not_lead_inside(tmp_path: Path) -> None:
    copy_of("qwen3", tmp_path / "outside")
    (tmp_path / "root").mkdir()
    link = tmp_path / "root" / "link"
    link.symlink_to(tmp_path / "outside")
    roots = WeightRoots((str(tmp_path / "root"),))
    assert roots.find(str(link)) == link
    os.lchown(link, 12345, 12345)
    with pytest.raises(StartupError, match="--weights-root"):
        roots.find(str(link))


def test_the_servers_own_folder_is_always_allowed(tmp_path: Path) -> None:
    releases = [copy_of("qwen3", tmp_path / "data" / f"release-{number}") for number in (1, 2)]
    (tmp_path / "deployed").mkdir()
    current = tmp_path / "deployed" / "current"
    current.symlink_to(releases[0])
    own = own_names(str(current))
    for roots in (
        WeightRoots((str(default_root(current)),), own=own),
        WeightRoots(("/no/such/root",), own=own),
    ):
        assert roots.find(str(current)) == current
        assert roots.find(f"{current}/") == current
        assert roots.find(str(releases[0])) == releases[0]
        with pytest.raises(StartupError, match="--weights-root"):
            roots.find(f"{current}/../../data/release-2")
        with pytest.raises(StartupError, match="--weights-root"):
            roots.find(str(releases[1]))
    # The next release, by the link.
    current.unlink()
    current.symlink_to(releases[1])
    assert WeightRoots(("/no/such/root",), own=own).find(str(current)) == current
    assert own_names("org/model") == {"org/model"}


def test_by_default_weights_come_from_beside_the_model() -> None:
    assert default_root(Path("/models/a")) == Path("/models")
    assert default_root(Path("/a")) == Path("/a")


def test_an_update_waits_for_a_long_request_and_newcomers_wait_for_it(
    served: tuple[str, ServerProcess], replaced: tuple[Path, list[int]]
) -> None:
    model, server = served
    folder, expected = replaced
    long_before = generate(server, 150, "wheel")["output_ids"]
    with ThreadPoolExecutor(16) as pool:
        with slowed(server):
            running = pool.submit(generate, server, 150, "wheel")
            until_running(server)
            update = pool.submit(load, server, folder, weight_version="new")
            # Nothing tells from outside when it has begun, but that newcomers are held back.
            while not queues(server)["paused"]:
                assert not running.done()
                newcomer = pool.submit(generate, server)
                wait([newcomer], timeout=0.2)
        # Old weights to the end, the new ones from the beginning, and nobody saw an error.
        assert running.result()["output_ids"] == long_before
        assert running.result()["meta_info"]["weight_version"] != "new"
        assert update.result().json()["success"] is True
        assert newcomer.result()["output_ids"] == expected
        assert newcomer.result()["meta_info"]["weight_version"] == "new"
        ended = [
            each.result()["meta_info"]["response_sent_to_client_ts"] for each in (running, newcomer)
        ]
    assert ended == sorted(ended)
    assert load(server, tiny_model(model), weight_version="default").status_code == 200


def test_an_update_may_abort_instead(served: tuple[str, ServerProcess]) -> None:
    model, server = served
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(generate(server, 200, "wheel")))
    with slowed(server):
        thread.start()
        until_running(server)
        answer = load(server, tiny_model(model), abort_all_requests=True)
    assert answer.json()["success"] is True
    thread.join()
    assert found[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < found[0]["meta_info"]["completion_tokens"] < 200


def test_a_worker_that_dies_comes_back_with_the_weights_it_had(tmp_path: Path) -> None:
    folder = other_weights("qwen3", tmp_path / "other")
    with ServerProcess("--model-path", str(tiny_model("qwen3")), *ONE_THREAD) as server:
        server.wait_ready()
        before = generate(server)["output_ids"]
        assert load(server, folder, weight_version="kept").json()["success"] is True
        expected = generate(server)["output_ids"]
        assert expected != before
        (worker,) = [
            child
            for child in psutil.Process(server.process.pid).children()
            if "scheduler" in child.cmdline()
        ]
        worker.kill()
        server.wait_for_line("starting it again")
        until(lambda: server.client.get("/ready").status_code == 200, 60)
        answer = generate(server)
        assert answer["output_ids"] == expected
        assert answer["meta_info"]["weight_version"] == "kept"
