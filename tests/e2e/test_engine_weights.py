"""The offline engine takes new weights, pauses, and gives memory back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headrace as sgl
from headrace.trainer import broadcast_weights, describe_tensors, init_update_group
from tests.support.offline import ROOT, slowed
from tests.support.server import free_port
from tests.support.tiny_models import other_weights, tiny_model
from tests.support.waiting import until, until_in_loop

PROMPT = "The miller opens the gate, the wheel turns, and the stones grind wheat."
SHORT = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
OPTIONS = {"num_threads": 1, "random_seed": 1, "grammar_backend": "none"}
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path=str(tiny_model("qwen3")), **OPTIONS) as engine:
        yield engine


@pytest.fixture
def fresh(engine: sgl.Engine) -> Iterator[sgl.Engine]:
    """The engine, with its first weights before and after."""
    yield engine
    # A test that failed leaves no pause behind, in which the next would wait for ever.
    engine.continue_generation()
    success, message, paused = engine.update_weights_from_disk(
        str(tiny_model("qwen3")), weight_version="default"
    )
    assert (success, paused) == (True, 0), message


def ids(engine: sgl.Engine) -> list[int]:
    return engine.generate(PROMPT, SHORT)["output_ids"]


@pytest.fixture
def other(fresh: sgl.Engine, tmp_path: Path) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Other weights, and what they answer when they come from disk."""
    before = ids(fresh)
    folder = other_weights("qwen3", tmp_path / "other")
    assert fresh.update_weights_from_disk(str(folder)) == (
        True,
        "Succeeded to update model weights.",
        0,
    )
    assert fresh.get_model_info()["model_path"] == str(folder)
    expected = ids(fresh)
    assert expected != before
    assert fresh.update_weights_from_disk(str(tiny_model("qwen3")))[0]
    assert ids(fresh) == before
    return load_file(folder / "model.safetensors"), expected


def test_a_folder_that_is_not_there(engine: sgl.Engine) -> None:
    before = ids(engine)
    success, message, _ = engine.update_weights_from_disk("/no/such/folder")
    assert not success
    assert message == "Failed to get weights iterator: /no/such/folder is not a folder."
    success, message, _ = engine.update_weights_from_disk("x", load_format="pt")
    assert not success
    assert "not one of auto, safetensors, dummy" in message
    assert ids(engine) == before


def test_other_weights_answer_as_a_fresh_engine(fresh: sgl.Engine, tmp_path: Path) -> None:
    folder = other_weights("qwen3", tmp_path / "other")
    with sgl.Engine(model_path=str(folder), **OPTIONS) as another:
        expected = another.generate(PROMPT, SHORT)
    before = ids(fresh)
    assert expected["output_ids"] != before
    assert fresh.update_weights_from_disk(str(folder), weight_version="2")[0]
    after = fresh.generate(PROMPT, SHORT)
    assert after["output_ids"] == expected["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["meta_info"]["weight_version"] == "2"
    assert fresh.update_weights_from_disk(str(tiny_model("qwen3")))[0]
    assert ids(fresh) == before
    assert fresh.update_weights_from_tensor(load_file(folder / "model.safetensors"))[0]
    assert ids(fresh) == expected["output_ids"]


def test_tensors(fresh: sgl.Engine, other: tuple[dict[str, torch.Tensor], list[int]]) -> None:
    tensors, expected = other
    # The reference's form, a list of pairs; and what `state_dict` gives.
    for named in (list(tensors.items()), tensors):
        assert fresh.update_weights_from_tensor(named) == (True, "Success")
        assert ids(fresh) == expected
    held = torch.tensor(fresh.get_weights_by_name(NAME, truncate_size=5))
    assert torch.equal(held, tensors[NAME][:5])
    success, message = fresh.update_weights_from_tensor([("nobody", torch.zeros(1))])
    assert not success
    assert "1 tensor unknown (nobody)" in message
    with pytest.raises(ValueError, match="no weight 'nobody'"):
        fresh.get_weights_by_name("nobody")


def test_broadcast(fresh: sgl.Engine, other: tuple[dict[str, torch.Tensor], list[int]]) -> None:
    tensors, expected = other
    port, answers = free_port(), []

    def serve() -> None:
        answers.append(
            fresh.init_weights_update_group("127.0.0.1", port, 1, 2, "group", backend="gloo")
        )
        body = describe_tensors(tensors)
        answers.append(fresh.update_weights_from_distributed(**body, group_name="group"))
        answers.append(fresh.destroy_weights_update_group("group"))

    thread = threading.Thread(target=serve)
    thread.start()
    broadcast_weights(tensors, init_update_group("127.0.0.1", port, 2, "group", "gloo"))
    thread.join(60)
    assert [success for success, _ in answers] == [True, True, True], answers
    assert ids(fresh) == expected


SILENT_TRAINER = """
import sys
from runtime.weights.update_group import create_group

group = create_group("127.0.0.1", int(sys.argv[1]), 0, 2, "silent", "gloo")
sys.stdin.read()
"""


def test_while_a_broadcast_is_awaited_requests_can_be_ended(fresh: sgl.Engine) -> None:
    before = ids(fresh)
    port = free_port()
    arguments = [sys.executable, "-c", SILENT_TRAINER, str(port)]
    trainer = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE)
    with trainer, ThreadPoolExecutor(2) as pool:
        assert fresh.init_weights_update_group("127.0.0.1", port, 1, 2, "silent", "gloo")[0]
        # As with NCCL: nothing computes until everything has come.
        fresh.context.weights._host_groups.clear()
        with slowed(fresh):
            frozen = fresh.generate(PROMPT, LONG, rid="frozen", stream=True)
            next(frozen)
            fresh.pause_generation("in_place")
        body = {"names": [NAME], "dtypes": ["float32"], "shapes": [[64, 96]]}
        update = pool.submit(
            fresh.update_weights_from_distributed, **body, group_name="silent", timeout=60.0
        )
        until(lambda: "update" in fresh.context.client.gate.reasons)
        # One that waits at the gate, and one that the worker has.
        held = pool.submit(fresh.generate, PROMPT, SHORT, rid="held")
        until(lambda: fresh.context.client.is_running("held"))
        for rid in ("held", "frozen"):
            fresh.abort(rid)
        assert held.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
        assert list(frozen)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert not update.done()
        # The wait itself can be ended, too.
        assert fresh.destroy_weights_update_group("silent")[0]
        success, message = update.result(60)
        assert not success
        assert "There is no group 'silent'" in message
        trainer.communicate()
    fresh.continue_generation()
    assert ids(fresh) == before


async def test_awaited_while_a_request_is_frozen(fresh: sgl.Engine) -> None:
    expected = (await fresh.async_generate(PROMPT, LONG))["output_ids"]
    with slowed(fresh):
        running = asyncio.create_task(fresh.async_generate(PROMPT, LONG))
        shared = fresh.context.status.replicas[0].shared
        await until_in_loop(lambda: shared["num_running_reqs"])
        await fresh.async_pause_generation("retract")
    waiting = asyncio.create_task(fresh.async_generate(PROMPT, SHORT))
    await until_in_loop(lambda: fresh.context.client.gate.num_held)
    path = str(tiny_model("qwen3"))
    success, _, paused = await fresh.async_update_weights_from_disk(path, weight_version="again")
    assert success
    assert paused == 2
    assert not running.done()
    await fresh.async_continue_generation()
    answer: dict[str, Any] = await running
    assert answer["output_ids"] == expected
    assert answer["meta_info"]["weight_version"] == "again"
    assert (await waiting)["output_ids"] == expected[:12]


def test_memory(engine: sgl.Engine) -> None:
    before = ids(engine)
    engine.release_memory_occupation(["weights", "kv_cache"])
    with pytest.raises(sgl.EngineError, match="released") as caught:
        engine.generate(PROMPT, SHORT)
    assert not isinstance(caught.value, sgl.EngineDeadError)
    engine.resume_memory_occupation()
    assert ids(engine) == before
    with pytest.raises(ValueError, match="'what', expected 'cuda_graph' or 'kv_cache'"):
        engine.release_memory_occupation(["what"])
    with pytest.raises(ValueError, match="got `str` - at `tags`"):
        engine.release_memory_occupation("weights")
    with slowed(engine):
        stream = engine.generate(PROMPT, LONG, stream=True)
        next(stream)
        with pytest.raises(ValueError, match="1 requests are running"):
            engine.release_memory_occupation()
        stream.close()
    until(lambda: not engine.context.client.num_in_flight)


def test_checks_and_versions(fresh: sgl.Engine) -> None:
    assert fresh.check_weights("snapshot")[0]
    assert fresh.begin_weight_update() == (True, "Success")
    assert fresh.update_weights_from_tensor({NAME: torch.zeros(64, 96)})[0]
    assert fresh.end_weight_update() == (True, "Success")
    success, message = fresh.check_weights("compare")
    assert not success
    assert NAME in message
    assert fresh.update_weight_version("v9") == (True, "Weight version updated to v9")
    assert fresh.generate(PROMPT, SHORT)["meta_info"]["weight_version"] == "v9"
    assert not fresh.check_weights("what")[0]
    with pytest.raises(ValueError, match="mode"):
        fresh.pause_generation("now")
