"""A cross-encoder and a reward model with trained heads: sensible orders, on two ranks."""

import random
import re

import pytest
import torch

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
