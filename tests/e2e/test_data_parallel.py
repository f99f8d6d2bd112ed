"""Replicas behind one front answer as one engine does, share the work, and keep their prefixes."""

from __future__ import annotations

import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import headrace as sgl
from tests.support.grammar_backends import needs_grammars
from tests.support.server import ServerProcess, running_server
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

MODEL = "llama"
OPTIONS = ("--num-threads", "1", "--random-seed", "3")
GREEDY = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
PROMPTS = [f"{index} The miller opens the gate, " * (1 + index % 3) for index in range(8)]
# Over a hundred tokens: some blocks of the prefix index, some pages.
STORY = "Once upon a time the wheel turned and the water ran below the mill. " * 4


def replicas() -> ServerProcess:
    root = ("--profile-root", tempfile.gettempdir())
    return running_server(MODEL, "--dp-size", "2", *root, *OPTIONS)


def ask(server: ServerProcess, text: str, **more: Any) -> dict[str, Any]:
    body = {"text": text, "sampling_params": GREEDY, **more}
    answer = server.client.post("/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask_all(server: ServerProcess) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda text: ask(server, text), PROMPTS))


def ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def test_two_replicas_give_the_tokens_of_one() -> None:
    answers = ask_all(replicas())
    assert ids(answers) == ids(ask_all(running_server(MODEL, *OPTIONS)))
    assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
    loads = replicas().client.get("/v1/loads").json()["loads"]
    assert [each["dp_rank"] for each in loads] == [0, 1]
    assert all(each["max_total_num_tokens"] > 0 for each in loads)


def test_replicas_of_two_ranks_give_the_tokens_of_one_process() -> None:
    options = ("--dp-size", "2", "--tp-size", "2", "--grammar-backend", "none", *OPTIONS)
    with ServerProcess("--model-path", str(tiny_model(MODEL)), *options) as server:
        server.wait_ready()
        answers = ask_all(server)
        info = server.client.get("/server_info").json()
    assert ids(answers) == ids(ask_all(running_server(MODEL, *OPTIONS)))
    assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
    assert (info["dp_size"], info["tp_size"]) == (2, 2)


def test_a_prefix_is_found_again_and_a_flush_reaches_every_replica() -> None:
    server = replicas()
    server.client.post("/flush_cache").raise_for_status()
    first = ask(server, STORY)["meta_info"]
    assert first["cached_tokens"] == 0
    for turn in range(4):
        ask(server, f"{turn} is something else that comes in between", sampling_params={})
        again = ask(server, STORY + "And then? " * turn)["meta_info"]
        assert again["dp_rank"] == first["dp_rank"]
        assert again["cached_tokens"] > 50
    for rank in (0, 1):
        ask(server, STORY, data_parallel_rank=rank)
        warm = ask(server, STORY, routed_dp_rank=rank)["meta_info"]
        assert (warm["dp_rank"], warm["cached_tokens"] > 50) == (rank, True)
    server.client.post("/flush_cache").raise_for_status()
    for rank in (0, 1):
        assert ask(server, STORY, data_parallel_rank=rank)["meta_info"]["cached_tokens"] == 0


def test_samples_of_one_prompt_share_its_replica() -> None:
    body = {"max_new_tokens": 4, "n": 2, "temperature": 1.0}
    # A start of its own: a prefix that both hold would draw nobody.
    answers = ask(replicas(), "Now hear this: " + STORY + STORY[:150], sampling_params=body)
    assert len({answer["meta_info"]["dp_rank"] for answer in answers}) == 1  # type: ignore[index]


def test_a_replica_that_is_not_there_is_refused() -> None:
    body = {"text": "a", "data_parallel_rank": 2}
    answer = replicas().client.post("/generate", json=body)
    assert answer.status_code == 400
    assert "data_parallel_rank must be in [0, 2)" in answer.text


def test_abort_all_reaches_every_replica() -> None:
    server = replicas()
    long = {**GREEDY, "max_new_tokens": 240}

    def run(index: int) -> dict[str, Any]:
        return ask(server, f"{index}", sampling_params=long, data_parallel_rank=index % 2)

    def num_running() -> list[int]:
        loads = server.client.get("/v1/loads").json()["loads"]
        return [each["num_running_reqs"] for each in loads]

    slow = {"forward_sleep_time": 0.05}
    server.client.post("/slow_down", json=slow).raise_for_status()
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(run, index) for index in range(8)]
        while num_running() != [4, 4]:
            assert not any(each.done() for each in running), "too fast to be aborted"
        server.client.post("/abort_request", json={"abort_all": True})
        for each in running:
            assert each.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
    server.client.post("/slow_down", json={}).raise_for_status()


@needs_grammars
def test_a_grammar_reaches_every_replica() -> None:
    params = {"max_new_tokens": 8, "temperature": 1.0, "regex": "[0-9]{4}"}
    for rank in (0, 1, 0, 1):
        answer = ask(replicas(), "The year", sampling_params=params, data_parallel_rank=rank)
        assert re.fullmatch("[0-9]{4}", answer["text"]), answer


def test_replicas_of_several_ranks_answer() -> None:
    options = ("--dp-size", "2", "--tp-size", "2", *OPTIONS)
    with ServerProcess("--model-path", str(tiny_model(MODEL)), *options) as server:
        server.wait_ready()
        for rank in (0, 1):
            answer = ask(server, PROMPTS[0], data_parallel_rank=rank)
            plain = ask(running_server(MODEL, *OPTIONS), PROMPTS[0])
            assert answer["output_ids"] == plain["output_ids"]


def test_the_offline_engine_has_replicas_too() -> None:
    options = {"num_threads": 1, "random_seed": 3, "grammar_backend": "none"}
    with sgl.Engine(model_path=str(tiny_model(MODEL)), dp_size=2, **options) as engine:
        answers = engine.generate(PROMPTS, GREEDY)
        assert ids(answers) == ids(ask_all(running_server(MODEL, *OPTIONS)))
        assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
        one = engine.generate(PROMPTS[0], GREEDY, data_parallel_rank=1)
        assert one["meta_info"]["dp_rank"] == 1
        with pytest.raises(ValueError, match="data_parallel_rank must be in"):
            engine.generate("a", data_parallel_rank=2)
        engine.flush_cache()


def test_every_replica_writes_its_own_profile(tmp_path: Path) -> None:
    server = replicas()
    asked = {"output_dir": str(tmp_path), "profile_id": "d", "num_steps": 2, "with_stack": False}
    server.client.post("/start_profile", json=asked).raise_for_status()
    for rank in (0, 1):
        ask(server, "The wheel", data_parallel_rank=rank)
    names = {f"d-TP-0-DP-{rank}.trace.json.gz" for rank in (0, 1)}
    until(lambda: names == {path.name for path in tmp_path.iterdir()}, 20, "no traces")
