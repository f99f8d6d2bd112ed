"""A cross-encoder and a reward model with trained heads: sensible orders, on two ranks."""

import json
import random
import re

import pytest
import torch

from runtime.checkpoint.score_activation import FILE, read_score_activation
from tests.support.native import run_example
from tests.support.server import ServerProcess
from tests.support.trained_heads import TOPICS, pair_of, text_of, trained

# Of sixteen; the models were not shown these pairs.
LEAST_RIGHT = 15


@pytest.fixture(scope="module")
def reranker():
    with ServerProcess("--model-path", str(trained("rerank")), "--tp-size", "2") as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def rewarder():
    with ServerProcess("--model-path", str(trained("reward")), "--tp-size", "2") as process:
        yield process.wait_ready()


def ask(server, path, **body):
    answer = server.client.post(path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def their_model(kind):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = trained(kind)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def test_documents_of_the_query_s_topic_come_first(reranker):
    chance = random.Random(11)
    model, tokenizer = their_model("rerank")
    num_right = 0
    for index in range(16):
        topics = list(TOPICS)
        topic = topics[index % len(topics)]
        query, documents = text_of(topic, chance), [text_of(each, chance) for each in topics]
        answers = ask(reranker, "/v1/rerank", query=query, documents=documents)
        num_right += answers[0]["index"] == topics.index(topic)
        inputs = tokenizer([query] * 4, documents, return_tensors="pt", return_token_type_ids=True)
        with torch.inference_mode():
            expected = model(**inputs).logits[:, 0]
        for each in answers:
            assert each["score"] == pytest.approx(float(expected[each["index"]]), abs=1e-3)
    assert num_right >= LEAST_RIGHT


def test_relevance_is_that_of_sentence_transformers(reranker):
    from sentence_transformers import CrossEncoder

    chance = random.Random(13)
    query, documents = text_of("sea", chance), [text_of(each, chance) for each in TOPICS]
    theirs = CrossEncoder(str(trained("rerank")), device="cpu").rank(query, documents)
    order = [each["corpus_id"] for each in theirs]
    scores = [pytest.approx(float(each["score"]), abs=1e-3) for each in theirs]
    objects = [{"text": text, "id": index} for index, text in enumerate(documents)]
    for path, sent in (("/rerank", documents), ("/rerank", objects), ("/v2/rerank", objects)):
        answer = ask(reranker, path, model="m", query=query, documents=sent)
        assert [each["index"] for each in answer["results"]] == order
        assert [each["relevance_score"] for each in answer["results"]] == scores
        returned = [each.get("document") for each in answer["results"]]
        assert returned == [
            None
            if path == "/v2/rerank"
            else {"text": documents[index]} | ({"id": index} if sent is objects else {})
            for index in order
        ]
        assert answer["model"] == "m"
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > len(documents)
        assert answer["meta"]["api_version"]["version"] == "2"
        fields = {"query": query, "documents": sent, "top_n": 2, "return_documents": None}
        assert len(ask(reranker, path, **fields)["results"]) == 2
        switched = ask(reranker, path, **fields | {"return_documents": path == "/v2/rerank"})
        assert ["document" in each for each in switched["results"]] == [path == "/v2/rerank"] * 2
    # The former route has the score as the model gives it, and takes null for absent.
    raw = ask(reranker, "/v1/rerank", query=query, documents=documents, return_documents=None)
    assert [each["index"] for each in raw] == order
    assert raw[0]["document"] == documents[order[0]]


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank"])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"documents": []}, "documents"),
        ({"documents": [{"title": "a"}]}, "text"),
        ({"documents": [{"text": 5}]}, "text"),
        ({"documents": ["a", " "]}, "blank"),
        ({"documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "", "documents": ["a"]}, "query"),
    ],
)
def test_what_is_wrong_with_a_ranking_is_said(reranker, path, changes, named):
    answer = reranker.client.post(path, json={"query": "q", **changes}, timeout=60)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    # Where Cohere's clients look.
    assert named in answer.json()["message"]


def test_replies_to_the_question_have_the_larger_reward(rewarder):
    chance = random.Random(12)
    model, tokenizer = their_model("reward")
    num_right = 0
    for _ in range(16):
        pairs = [pair_of(chance, fits=fits) for fits in (True, False)]
        texts = [f"{question} [SEP] {reply} [SEP]" for question, reply in pairs]
        good, bad = (each["embedding"] for each in ask(rewarder, "/classify", text=texts))
        num_right += good[0] > bad[0]
        for text, found in zip(texts, (good, bad), strict=True):
            with torch.inference_mode():
                expected = model(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0]
            assert found == pytest.approx(expected.tolist(), abs=1e-3)
    assert num_right >= LEAST_RIGHT


def test_the_examples(reranker, rewarder):
    scores = re.findall(r"^Score: (-?[\d.]+) - ", run_example("rerank.py", reranker), re.MULTILINE)
    assert len(scores) == 2
    assert float(scores[0]) >= float(scores[1])
    rewards = re.findall(r"^reward: (-?[\d.]+)", run_example("classify.py", rewarder), re.MULTILINE)
    assert len(rewards) == 2


IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"
ACTIVATIONS = [
    ({}, None),
    ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}, None),
    ({"sentence_transformers": {"activation_fn": SIGMOID}}, {"prompts": {}}),
    ({"sbert_ce_default_activation_function": IDENTITY}, None),
    (
        {
            "sbert_ce_default_activation_function": IDENTITY,
            "sentence_transformers": {"activation_fn": SIGMOID},
        },
        None,
    ),
    (
        {"sentence_transformers": {"activation_fn": IDENTITY}},
        {"activation_fn": SIGMOID, "model_type": "CrossEncoder"},
    ),
    ({}, {"activation_fn": IDENTITY, "model_type": "CrossEncoder"}),
    ({}, {"activation_fn": None, "model_type": "CrossEncoder"}),
]


@pytest.mark.parametrize(("config", "written"), ACTIVATIONS)
def test_the_activation_is_that_of_sentence_transformers(tmp_path, config, written):
    from sentence_transformers import CrossEncoder

    folder = tmp_path / "model"
    folder.mkdir()
    for path in trained("rerank").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    values = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps(values))
    if written is not None:
        kind = "sentence_transformers.base.modules.transformer.Transformer"
        modules = [{"idx": 0, "name": "0", "path": "", "type": kind}]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / FILE).write_text(json.dumps(written))
    theirs = type(CrossEncoder(str(folder), device="cpu").activation_fn).__name__.lower()
    assert read_score_activation(folder, values) == theirs


def test_a_file_that_stands_for_the_configuration_names_an_activation(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    assert read_score_activation(path, {"sentence_transformers": "x"}) == "sigmoid"
