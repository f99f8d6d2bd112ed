"""A model whose layers are in two stages, each on a node, answers as one process does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.test_kill import Clients, is_ready, restarts, wait_gone
from tests.support.nodes import TwoNodes
from tests.support.same_answers import OPTIONS, answers
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

# Tied embeddings: the first stage embeds with a matrix of which the last one has a copy.
MODEL = "llama_tied"
LOGPROBS: dict[str, Any] = {
    "text": "The miller opens the gate, the wheel turns, the stones grind",
    "sampling_params": {"max_new_tokens": 8, "temperature": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with TwoNodes(tiny_model(MODEL), "--pp-size", "2", *OPTIONS) as nodes:
        nodes.server.wait_ready()
        yield nodes


@pytest.fixture(scope="module")
def alone() -> Iterator[ServerProcess]:
    with ServerProcess("--model-path", str(tiny_model(MODEL)), *OPTIONS) as server:
        yield server.wait_ready()


def _logprobs(server: ServerProcess) -> list[float]:
    answer = server.client.post("/generate", json=LOGPROBS, timeout=60)
    meta = answer.json()["meta_info"]
    found = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    for top in (*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]):
        found += top
    return [row[0] for row in found]


def test_two_stages_give_the_tokens_of_one_process(nodes: TwoNodes, alone: ServerProcess) -> None:
    wanted = answers(alone)
    # The second time prompts are cached, and the small pool retracts other requests.
    for _ in range(2):
        for (ids, numbers), (wanted_ids, wanted_numbers) in zip(
            answers(nodes.server), wanted, strict=True
        ):
            assert ids == wanted_ids
            assert numbers == pytest.approx(wanted_numbers, abs=1e-3)
    assert "Retracting" in nodes.server.log
    assert _logprobs(nodes.server) == pytest.approx(_logprobs(alone), abs=1e-3)
    assert nodes.server.client.get("/server_info").json()["pp_size"] == 2


def test_weights_of_both_stages_are_read_and_changed(nodes: TwoNodes, alone: ServerProcess) -> None:
    body = {"model_path": str(tiny_model(MODEL))}
    answer = nodes.server.client.post("/update_weights_from_disk", json=body, timeout=60)
    assert answer.json()["success"], answer.text
    for name in ("embed_tokens", "layers.0.mlp.up_proj", "layers.2.mlp.up_proj", "norm"):
        asked = {"name": f"model.{name}.weight", "truncate_size": 3}
        ours, theirs = (
            server.client.post("/get_weights_by_name", json=asked, timeout=60)
            for server in (nodes.server, alone)
        )
        assert ours.status_code == 200, ours.text
        assert ours.json() == theirs.json()


def test_a_killed_stage_is_named_and_all_start_again(nodes: TwoNodes) -> None:
    (rank,) = nodes.ranks
    before = restarts(nodes.server)
    clients = Clients(nodes.server.url, 3)
    clients.wait_started()
    os.kill(rank, signal.SIGKILL)
    wait_gone(nodes.server, before)
    clients.join()
    assert len(clients.endings) == 3
    until(lambda: is_ready(nodes.server), 120, nodes)
    lines = [line for line in nodes.server.lines if "Rank 1 of the worker was ended by" in line]
    assert len(lines) == 1
    assert "Node 1 (" in lines[0]
    assert "Traceback" not in nodes.server.log


def test_a_killed_node_joins_again(nodes: TwoNodes, alone: ServerProcess) -> None:
    before = restarts(nodes.server)
    nodes.node.signal(signal.SIGKILL)
    wait_gone(nodes.server, before)
    nodes.node.wait_exit()
    nodes.node = nodes.start_node()
    until(lambda: is_ready(nodes.server), 120, nodes)
    assert _logprobs(nodes.server) == pytest.approx(_logprobs(alone), abs=1e-3)
