"""A model that gives vectors, over HTTP with real clients, and in the engine."""

import asyncio
import base64
import json
import struct

import httpx
import openai
import pytest
import torch

import headrace as sgl
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_bert
from tests.support.waiting import until

# Vectors are compared digit by digit; only the engine below has the default, which rounds products.
EXACT = ("--dtype", "float32")
TEXTS = ["Paris is the capital of France.", "hello", "one two three four " * 8]


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--model-path", str(tiny_bert("bert")), *EXACT) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def expected():
    """What `transformers` gives: means of all tokens, of unit length."""
    from transformers import AutoModel, AutoTokenizer

    folder = tiny_bert("bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            mean = model(ids).last_hidden_state[0].mean(dim=0)
        found.append(torch.nn.functional.normalize(mean, dim=-1))
    return torch.stack(found)


def close(found, expected):
    torch.testing.assert_close(torch.tensor(found), expected, atol=2e-5, rtol=2e-5)


def aligned(found, expected):
    cosines = torch.nn.functional.cosine_similarity(torch.tensor(found), expected, dim=-1)
    assert (1 - cosines).max() < 1e-4


def ask(server, path, **body):
    return server.client.post(path, json=body, timeout=60)


def test_ollamas_routes(server):
    from sentence_transformers import SentenceTransformer

    expected = torch.from_numpy(
        SentenceTransformer(str(tiny_bert("bert")), device="cpu").encode(TEXTS)
    )
    answer = ask(server, "/api/embed", model="m", input=TEXTS, options={"num_ctx": 8}).json()
    close(answer["embeddings"], expected)
    assert answer["model"] == "m"
    assert answer["prompt_eval_count"] > len(TEXTS)
    assert answer["total_duration"] > 0
    one = ask(server, "/api/embed", model="m", input=TEXTS[0], keep_alive="5m").json()
    close(one["embeddings"], expected[:1])
    old = ask(server, "/api/embeddings", model="m", prompt=TEXTS[1]).json()
    close(old["embedding"], expected[1])
    for body in ({"input": ""}, {"input": []}, {}):
        assert ask(server, "/api/embed", model="m", **body).json()["embeddings"] == []
    assert ask(server, "/api/embeddings", model="m").json() == {"embedding": []}
    # A text that is too long is cut, unless one says otherwise.
    long = "one two three four " * 200
    assert len(ask(server, "/api/embed", model="m", input=long).json()["embeddings"]) == 1
    assert ask(server, "/api/embeddings", model="m", prompt=long).status_code == 200
    refused = ask(server, "/api/embed", model="m", input=long, truncate=False)
    assert refused.status_code == 400
    assert "context length" in refused.json()["error"]
    refused = ask(server, "/api/embed", model="m", input="a", dimensions=3)
    assert "dimensions" in refused.json()["error"]
    shown = ask(server, "/api/show", model="m").json()
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"]["bert.embedding_length"] == expected.shape[1]


def test_lines_of_a_batch(server, expected):
    """As the route answers them, one with several texts and one in base64 among them."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    bodies = [
        {"input": TEXTS},
        {"input": TEXTS[1], "encoding_format": "base64"},
        {"input": TEXTS[0], "dimensions": -1},
    ]
    lines = [
        {"custom_id": f"n{at}", "method": "POST", "url": "/v1/embeddings", "body": body}
        for at, body in enumerate(bodies)
    ]
    content = b"\n".join(json.dumps({**each}).encode() for each in lines)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    until(lambda: client.batches.retrieve(batch.id).status == "completed", what=batch.id)
    done = client.batches.retrieve(batch.id)
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    several, packed = (
        json.loads(each)["response"]["body"]
        for each in client.files.content(done.output_file_id).text.splitlines()
    )
    assert [each["index"] for each in several["data"]] == [0, 1, 2]
    close([each["embedding"] for each in several["data"]], expected)
    raw = base64.b64decode(packed["data"][0]["embedding"])
    close(struct.unpack(f"<{len(raw) // 4}f", raw), expected[1])
    (failed,) = client.files.content(done.error_file_id).text.splitlines()
    assert json.loads(failed)["response"]["body"]["error"]["param"] == "dimensions"
    assert (
        done.usage.total_tokens
        == done.usage.input_tokens
        == sum(each["usage"]["prompt_tokens"] for each in (several, packed))
    )


def test_encode(server, expected):
    answer = ask(server, "/encode", text=TEXTS[0], model="ignored").json()
    close(answer["embedding"], expected[0])
    assert answer["meta_info"]["prompt_tokens"] > 3
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    answers = ask(server, "/encode", text=TEXTS, rid=["a", "b", "c"]).json()
    close([each["embedding"] for each in answers], expected)
    assert [each["meta_info"]["id"] for each in answers] == ["a", "b", "c"]
    ids = ask(server, "/tokenize", prompt=TEXTS[0]).json()["tokens"]
    close(ask(server, "/encode", input_ids=ids).json()["embedding"], expected[0])
    (one,) = ask(server, "/encode", input_ids=[ids]).json()
    close(one["embedding"], expected[0])


def test_the_openai_client(server, expected):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    # The client asks for base64 by itself.
    answer = client.embeddings.create(model="bert", input=TEXTS)
    close([each.embedding for each in answer.data], expected)
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 10
    plain = client.embeddings.create(model="bert", input=TEXTS[1], encoding_format="float")
    close(plain.data[0].embedding, expected[1])
    raw = ask(server, "/v1/embeddings", input=TEXTS[1], encoding_format="base64").json()
    data = base64.b64decode(raw["data"][0]["embedding"])
    close(list(struct.unpack(f"<{len(data) // 4}f", data)), expected[1])


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/encode", {}, "text"),
        ("/encode", {"text": "a", "input_ids": [1]}, "text"),
        ("/encode", {"text": []}, "inputs"),
        ("/encode", {"text": [["a", "b"]]}, "text"),
        ("/encode", {"input_ids": [1, [2]]}, "input_ids"),
        ("/encode", {"input_ids": [10**6]}, "input_ids"),
        ("/encode", {"input_ids": [5] * 129}, "context length"),
        ("/encode", {"text": "a", "dimensions": 8}, "dimensions"),
        ("/encode", {"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ("/v1/embeddings", {"input": ["a", 5]}, "input"),
        ("/v1/embeddings", {"input": ""}, "input must hold no empty"),
        ("/v1/embeddings", {"input": [""]}, "input must hold no empty"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input must hold no empty"),
        ("/v1/embeddings", {"input": [[]]}, "input must hold no empty"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": ["a"] * 3000}, "2048"),
        ("/generate", {"text": "a"}, "/encode"),
        ("/v1/completions", {"prompt": "a", "model": "m"}, "/encode"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "rerank"),
    ],
)
def test_what_is_wrong_is_a_400_that_says_so(server, path, body, named):
    answer = ask(server, path, **body)
    assert answer.status_code == 400
    assert named in answer.text
    assert ask(server, "/encode", text="still here").status_code == 200


def test_the_longest_text_fits(server):
    assert ask(server, "/encode", input_ids=[5] * 128).json()["meta_info"]["prompt_tokens"] == 128


def test_the_server_is_well(server):
    assert server.client.get("/health_generate").status_code == 200
    assert "/v1/embeddings" in server.log, "the example to paste is one that works"
    metrics = server.client.get("/model_info").json()
    assert metrics["is_generation"] is False


def test_an_answer_that_is_written_as_it_is_sent(server, expected):
    texts = TEXTS * 100
    answers = ask(server, "/encode", text=texts).json()
    close([each["embedding"] for each in answers], expected.repeat(100, 1))
    whole = ask(server, "/v1/embeddings", input=texts).json()
    assert [each["index"] for each in whole["data"]] == list(range(300))
    close([each["embedding"] for each in whole["data"]], expected.repeat(100, 1))
    raw = ask(server, "/v1/embeddings", input=texts, encoding_format="base64").json()["data"]
    assert base64.b64decode(raw[299]["embedding"]) == base64.b64decode(raw[2]["embedding"])


async def test_many_at_once_and_some_that_leave(server, expected):
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        tasks = [
            asyncio.create_task(client.post("/encode", json={"text": TEXTS[i % 3]}))
            for i in range(120)
        ]
        await tasks[0]
        for task in tasks[30:60]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    for i, answer in enumerate(answers):
        if isinstance(answer, httpx.Response):
            close(answer.json()["embedding"], expected[i % 3])
    assert sum(isinstance(answer, httpx.Response) for answer in answers) >= 90


def test_weights_change_while_it_serves(server, expected):
    """The same weights again: the route works, and the vectors stay."""
    answer = ask(server, "/update_weights_from_disk", model_path=str(tiny_bert("bert")))
    assert answer.json()["success"], answer.text
    close(ask(server, "/encode", text=TEXTS[0]).json()["embedding"], expected[0])


def test_two_ranks_and_two_replicas(expected):
    for options in (["--tp-size", "2"], ["--dp-size", "2"]):
        with ServerProcess("--model-path", str(tiny_bert("bert")), *EXACT, *options) as process:
            server = process.wait_ready()
            answers = ask(server, "/encode", text=TEXTS).json()
            close([each["embedding"] for each in answers], expected)


def test_the_engine(expected):
    with sgl.Engine(model_path=str(tiny_bert("bert"))) as engine:
        aligned(engine.encode(TEXTS[0])["embedding"], expected[0])
        aligned([each["embedding"] for each in engine.encode(TEXTS)], expected)
        aligned(asyncio.run(engine.async_encode(TEXTS[1]))["embedding"], expected[1])
        with pytest.raises(ValueError, match="/encode"):
            engine.generate("hello")
        with pytest.raises(ValueError, match="dimensions"):
            engine.encode("hello", dimensions=3)
