"""Hostile requests to a server of vectors: clear errors, unaffected neighbours, idle gauges."""

import asyncio
import json
import shutil

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.server import ServerProcess, common_server
from tests.support.tiny_models import tiny_bert
from tests.support.waiting import until

# A token whose vector is not a number.
BROKEN = 77
GOOD = [[5 + i, 6, 7 + 2 * i, 9] for i in range(30)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(tiny_bert("bert"), folder)
    weights = load_file(folder / "model.safetensors")
    (name,) = (each for each in weights if each.endswith("word_embeddings.weight"))
    weights[name][BROKEN] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with ServerProcess("--model-path", str(folder), "--enable-metrics") as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def expected(server):
    answers = ask(server, "/encode", input_ids=GOOD).json()
    return [each["embedding"] for each in answers]


@pytest.fixture(autouse=True)
def _idle_after(server, expected):
    yield
    until(lambda: load_of(server)["num_total_reqs"] == 0, what="requests are left")
    until(lambda: load_of(server)["num_used_tokens"] == 0, what="pages are left")
    metrics = server.client.get("/metrics").text
    gauges = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#"):
            gauges[name.partition("{")[0]] = float(value)
    assert gauges["sglang:num_running_reqs"] == gauges["sglang:num_queue_reqs"] == 0
    answers = ask(server, "/encode", input_ids=GOOD).json()
    close([each["embedding"] for each in answers], expected)


def load_of(server):
    (load,) = server.client.get("/v1/loads").json()["loads"]
    return load


def ask(server, path, **body):
    return server.client.post(path, json=body, timeout=120)


def close(found, wanted):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/encode", {"text": ["a"] * 10_000}, "2048"),
        ("/v1/embeddings", {"input": ["a"] * 10_000}, "2048"),
        ("/pooling", {"input": [[5]] * 10_000, "task": "token_embed"}, "2048"),
        ("/encode", {"text": []}, "1 to 2048"),
        ("/v1/embeddings", {"input": []}, "1 to 2048"),
        ("/encode", {"text": "gate " * 400_000}, "context length"),
        ("/v1/embeddings", {"input": ["a", "gate " * 400_000]}, "context length"),
        ("/pooling", {"input": "gate " * 400_000}, "context length"),
        ("/encode", {"text": "a", "prompt": "gate " * 400_000}, "context length"),
        ("/encode", {"input_ids": [5] * 1_000_000}, "context length"),
        ("/encode", {"input_ids": [[5], []]}, "empty"),
        ("/encode", {"text": "half a pair: \ud800"}, "not valid JSON"),
        ("/generate", {"text": "a"}, "gives vectors"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "gives vectors"),
        ("/v1/completions", {"prompt": "a"}, "gives vectors"),
        ("/v1/classify", {"input": "a"}, "gives vectors"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "gives vectors"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [5]}, "gives vectors"),
    ],
)
def test_what_cannot_be_answered_is_a_400_that_says_why(server, path, body, named):
    data = json.dumps(body)
    headers = {"content-type": "application/json"}
    answer = server.client.post(path, content=data, headers=headers, timeout=120)
    assert answer.status_code == 400, answer.text[:500]
    assert named in answer.text
    assert len(answer.text) < 2000


@pytest.mark.parametrize("path", ["/encode", "/classify", "/v1/embeddings", "/pooling"])
def test_a_model_that_generates_says_so(path):
    generating = common_server()
    answer = ask(generating, path, text="a", input="a")
    assert answer.status_code == 400
    assert "generates text" in answer.text


@pytest.mark.parametrize("body", [{"path": "/encode"}, {"path": "/pooling", "task": "token_embed"}])
def test_numbers_that_are_none_are_an_error_of_their_request_alone(server, expected, body):
    path, *_ = body.values()
    field = "input_ids" if path == "/encode" else "input"

    async def attack():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            lists = [[BROKEN, 5, 6] if i % 5 == 2 else GOOD[i] for i in range(len(GOOD))]
            wanted = {key: value for key, value in body.items() if key != "path"}
            answers = [client.post(path, json={**wanted, field: [each]}) for each in lists]
            together = client.post(path, json={**wanted, field: [GOOD[0], [9, BROKEN]]})
            return await asyncio.gather(*answers, together)

    *answers, together = asyncio.run(attack())
    for index, answer in enumerate(answers):
        if index % 5 == 2:
            assert answer.status_code == 500
            assert "no finite numbers" in answer.text
        else:
            assert answer.status_code == 200, answer.text
            if path == "/encode":
                close(answer.json()[0]["embedding"], expected[index])
    assert together.status_code == 500


def test_all_of_it_at_once_with_aborts_and_clients_that_leave(server, expected):
    async def attack():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            def post(path, **body):
                return asyncio.create_task(client.post(path, json=body))

            large = [post("/encode", input_ids=GOOD * 60, rid=f"large-{i}") for i in range(4)]
            wrong = [
                post("/encode", text=["a"] * 10_000),
                post("/encode", text="gate " * 400_000),
                post("/encode", input_ids=[[BROKEN]]),
                post("/v1/embeddings", input=[]),
                post("/generate", text="a"),
            ]
            leaving = [post("/pooling", input=GOOD * 60, task="token_embed") for _ in range(4)]
            right = [post("/encode", input_ids=GOOD) for _ in range(8)]
            aborts = [post("/abort_request", rid="large-0"), post("/abort_request", rid="large-3")]
            await asyncio.gather(*aborts)
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            return [await asyncio.gather(*tasks) for tasks in (large, wrong, right)]

    large, wrong, right = asyncio.run(attack())
    assert [each.status_code for each in wrong] == [400, 400, 500, 400, 400]
    for answer in large:
        # An abort may come before or after what it is about.
        assert answer.status_code == 200 or "bort" in answer.text, answer.text[:500]
    for answer in right:
        close([each["embedding"] for each in answer.json()], expected)


def test_an_aborted_text_ends_its_request(server):
    """What waits behind a pause is aborted for certain."""
    assert ask(server, "/pause_generation", mode="in_place").status_code == 200

    async def attack():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            task = asyncio.create_task(
                client.post("/encode", json={"input_ids": GOOD, "rid": "held"})
            )
            async with asyncio.timeout(60):
                # The first may come before the request.
                while not task.done():
                    await client.post("/abort_request", json={"rid": "held"})
                return await task

    try:
        answer = asyncio.run(attack())
    finally:
        assert ask(server, "/continue_generation").status_code == 200
    assert answer.status_code == 400
    assert "bort" in answer.text
