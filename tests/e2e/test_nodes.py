"""A model on two nodes answers as one process does, and lives on when a node dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from subprocess import TimeoutExpired

import pytest

from tests.faults.test_kill import Clients, is_ready, restarts, wait_gone
from tests.support.nodes import Namespace, TwoNodes
from tests.support.processes import alive
from tests.support.same_answers import OPTIONS, answers
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

STREAM = {
    "text": "The miller opens the gate,",
    "sampling_params": {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with TwoNodes(tiny_model("qwen2_moe"), "--tp-size", "2", "--ep-size", "2", *OPTIONS) as nodes:
        nodes.server.wait_ready()
        yield nodes
        # A node outlives the server of node 0, and waits for the next one.
        nodes.server.stop()
        nodes.node.wait_for_line("The worker of node 0 is gone")
        until(lambda: not nodes.ranks, 30, "an orphan is left")
        assert nodes.node.stop() == 0


def _ready_again(nodes: TwoNodes) -> None:
    until(lambda: is_ready(nodes.server), 120, nodes)


def test_two_nodes_give_the_tokens_of_one_process(nodes: TwoNodes) -> None:
    with ServerProcess("--model-path", str(tiny_model("qwen2_moe")), *OPTIONS) as alone:
        wanted = answers(alone.wait_ready())
    # The second time prompts are cached, and the small pool retracts other requests.
    for _ in range(2):
        for (ids, numbers), (wanted_ids, wanted_numbers) in zip(
            answers(nodes.server), wanted, strict=True
        ):
            assert ids == wanted_ids
            assert numbers == pytest.approx(wanted_numbers, abs=1e-3)
    assert "Retracting" in nodes.server.log


def test_every_node_takes_new_weights_from_disk(nodes: TwoNodes) -> None:
    body = {"model_path": str(tiny_model("qwen2_moe"))}
    answer = nodes.server.client.post("/update_weights_from_disk", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"]


def _refused(node: ServerProcess, why: str) -> None:
    assert node.wait_exit() == 1
    (line,) = [line for line in node.lines if line.startswith("headrace: ")]
    assert why in line


def test_a_second_node_of_a_number_is_refused(nodes: TwoNodes) -> None:
    _refused(nodes.start_node(), "Another node with --node-rank 1 is there already")


def test_a_killed_rank_of_another_node_is_named_and_all_start_again(nodes: TwoNodes) -> None:
    (rank,) = nodes.ranks
    before = restarts(nodes.server)
    clients = Clients(nodes.server.url, 3)
    clients.wait_started()
    os.kill(rank, signal.SIGKILL)
    wait_gone(nodes.server, before)
    clients.join()
    # The streams paused and went on.
    assert len(clients.endings) == 3
    _ready_again(nodes)
    lines = [line for line in nodes.server.lines if "Rank 1 of the worker was ended by" in line]
    assert len(lines) == 1
    assert "Node 1 (" in lines[0]
    assert "Traceback" not in nodes.server.log


def test_a_killed_node_is_named_and_joins_again(nodes: TwoNodes) -> None:
    ranks, before = nodes.ranks, restarts(nodes.server)
    nodes.node.signal(signal.SIGKILL)
    wait_gone(nodes.server, before)
    until(lambda: not any(map(alive, ranks)), 30, "an orphan is left")
    assert any("of the worker is gone: its connection closed" in x for x in nodes.server.lines)
    assert "Traceback" not in nodes.server.log
    nodes.node.wait_exit()
    # Nodes that do not fit are refused, and the right one is taken afterwards.
    ranks_differ = nodes.start_node("--tp-size", "4", "--ep-size", "1")
    model_differs = nodes.start_node("--model-path", str(tiny_model("qwen3")), "--ep-size", "1")
    _refused(ranks_differ, "--tp-size is not the same as on node 0: 4 here, 2 on node 0")
    _refused(model_differs, "The model (its config.json, or the names and sizes")
    nodes.node = nodes.start_node()
    _ready_again(nodes)
    assert nodes.server.client.post("/generate", json=STREAM, timeout=60).status_code == 200


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces")
@pytest.mark.parametrize("size", ["--tp-size", "--pp-size"])
def test_a_link_that_is_cut_for_ten_seconds_changes_no_token(size: str) -> None:
    network = Namespace("hrnodes")
    try:
        with TwoNodes(
            tiny_model("llama"),
            *(size, "2", "--num-threads", "1"),
            leader=network.here,
            prefix=network.prefix,
        ) as nodes:
            server = nodes.server.wait_ready()
            wanted = server.client.post("/generate", json=STREAM, timeout=60).json()["output_ids"]
            with server.client.stream(
                "POST", "/generate", json={**STREAM, "stream": True}, timeout=120
            ) as answer:
                events = (line for line in answer.iter_lines() if line)
                next(events)
                network.cut()
                # Nothing tells when ten seconds of silence are over.
                with pytest.raises(TimeoutExpired):
                    server.process.wait(10.0)
                network.mend()
                last = [line for line in events if "DONE" not in line][-1]
            assert str(wanted).replace(" ", "") in last.replace(" ", "")
            assert restarts(server) == 0
    finally:
        network.remove()
