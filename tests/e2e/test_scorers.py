"""Models that score texts, and decoders that give vectors, over HTTP and in the engine."""

import math

import pytest
import torch
from safetensors.torch import load_file

import headrace as sgl
from tests.support.server import ServerProcess, common_server
from tests.support.tiny_text_models import TEXT_MODELS, text_model, their_scores, their_vectors

QUERY = "What does the miller open?"
DOCUMENTS = ["The miller opens the gate.", "Paris is a capital.", "Numbers such as 0 1 2."]


@pytest.fixture(scope="module")
def classifier():
    with ServerProcess("--model-path", str(text_model("bert_scores"))) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def reranker():
    # As the documents start one.
    options = "--is-embedding --disable-radix-cache --chunked-prefill-size -1 --attention-backend"
    with ServerProcess(
        *("--model-path", str(text_model("xlm_roberta_scores"))), *options.split(), "torch"
    ) as process:
        yield process.wait_ready()


def ask(server, path, **body):
    return server.client.post(path, json=body, timeout=60)


def refused(server, path, message, **body):
    answer = ask(server, path, **body)
    assert answer.status_code == 400, answer.text
    assert message in answer.text


def ids_of(server, text):
    return ask(server, "/tokenize", prompt=text).json()["tokens"]


def pair_scores(name, query, documents):
    """What `transformers` gives for pairs, tokenizer included."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = text_model(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for document in documents:
        inputs = tokenizer(query, document, return_tensors="pt", return_token_type_ids=True)
        if model.config.type_vocab_size < 2:
            inputs.pop("token_type_ids")
        with torch.inference_mode():
            found.append(model(**inputs).logits[0])
    return torch.stack(found)


def close(found, expected, atol=5e-5):
    torch.testing.assert_close(torch.tensor(found), expected, atol=atol, rtol=5e-5)


def test_classify_gives_the_head_s_output(classifier):
    texts = [QUERY, *DOCUMENTS]
    expected = their_scores(text_model("bert_scores"), [ids_of(classifier, t) for t in texts])
    answers = ask(classifier, "/classify", model="ignored", text=texts).json()
    close([each["embedding"] for each in answers], expected)
    assert answers[0]["meta_info"]["prompt_tokens"] == len(ids_of(classifier, QUERY))
    one = ask(classifier, "/classify", text=QUERY).json()
    close(one["embedding"], expected[0])
    same = ask(classifier, "/encode", text=[[QUERY, each] for each in DOCUMENTS]).json()
    pairs = pair_scores("bert_scores", QUERY, DOCUMENTS)
    close([each["embedding"] for each in same], pairs)


def test_classes_with_their_probabilities(classifier):
    texts = [QUERY, *DOCUMENTS]
    logits = their_scores(text_model("bert_scores"), [ids_of(classifier, t) for t in texts])
    answer = ask(classifier, "/v1/classify", input=texts).json()
    assert answer["object"] == "list"
    assert answer["id"].startswith("classify-")
    names = ["bad", "fair", "good"]
    for index, (each, expected) in enumerate(zip(answer["data"], logits, strict=True)):
        close(each["probs"], expected.softmax(dim=-1))
        assert each["label"] == names[int(expected.argmax())]
        assert (each["index"], each["num_classes"]) == (index, 3)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 10
    scores = ask(classifier, "/v1/score", query="", items=texts, label_token_ids=[1]).json()
    close(scores["scores"], logits)


def test_documents_by_their_score(reranker):
    expected = pair_scores("xlm_roberta_scores", QUERY, DOCUMENTS)[:, 0].tolist()
    best = sorted(range(3), key=lambda index: -expected[index])
    answers = ask(reranker, "/v1/rerank", query=QUERY, documents=DOCUMENTS, model="m").json()
    assert [each["index"] for each in answers] == best
    assert [each["document"] for each in answers] == [DOCUMENTS[index] for index in best]
    for each in answers:
        assert math.isclose(each["score"], expected[each["index"]], abs_tol=5e-5)
    few = {"query": QUERY, "documents": DOCUMENTS, "top_n": 1, "return_documents": False}
    (only,) = ask(reranker, "/v1/rerank", **few).json()
    assert only["index"] == best[0]
    assert "document" not in only
    parts = [[{"type": "text", "text": each}] for each in DOCUMENTS]
    again = ask(reranker, "/v1/rerank", query=QUERY, documents=parts).json()
    assert [each["index"] for each in again] == best
    # A single class is a probability by itself.
    (one,) = ask(reranker, "/v1/classify", input=QUERY).json()["data"]
    assert 0.0 < one["probs"][0] < 1.0
    assert one["label"] == "LABEL_0"
    info = reranker.client.get("/server_info").json()
    assert info["is_embedding"] is True


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": " ", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents must not be empty"),
        ({"query": "a", "documents": ["b", ""]}, "documents must not be blank"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": [[{"type": "image_url", "image_url": {}}]]}, "text"),
        ({"query": "a", "documents": ["b"], "instruct": "c"}, "instruct"),
        ({"query": "a", "documents": ["b"] * 2049}, "2048"),
        # Each document gets the query.
        ({"query": "a" * 200_000, "documents": ["b"] * 200}, "characters together"),
    ],
)
def test_what_cannot_be_ranked_is_refused(reranker, body, message):
    refused(reranker, "/v1/rerank", message, **body)


def test_other_kinds_of_requests_are_refused(classifier, reranker):
    refused(classifier, "/v1/rerank", "3 classes", query="a", documents=["b"])
    refused(classifier, "/v1/embeddings", "/v1/classify", input="a")
    refused(classifier, "/generate", "scores texts", text="a")
    refused(classifier, "/v1/select", "gives scores", text="a", choices=["b"])
    refused(reranker, "/v1/completions", "scores texts", prompt="a", model="m")
    refused(classifier, "/classify", "pair of texts", text=[["a", "b", "c"]])


def test_a_decoder_gives_vectors_where_that_is_asked_for():
    folder = text_model("qwen3_bare")
    options = ("--is-embedding", "--dtype", "float32")
    with ServerProcess("--model-path", str(folder), *options) as server:
        server.wait_ready()
        texts = [QUERY, *DOCUMENTS]
        expected = their_vectors(folder, [ids_of(server, text) for text in texts], "last")
        answers = ask(server, "/encode", text=texts).json()
        close([each["embedding"] for each in answers], expected)
        data = ask(server, "/v1/embeddings", input=texts).json()["data"]
        close([each["embedding"] for each in data], expected)
        refused(server, "/generate", "/encode", text="a")
        refused(server, "/encode", "Pairs of texts", text=[["a", "b"]])
        refused(server, "/v1/embeddings", "Matryoshka", input="a", dimensions=16)
        refused(server, "/v1/classify", "gives vectors", input="a")


def test_two_ranks_share_a_reward_model():
    folder = text_model("llama_scores")
    with ServerProcess("--model-path", str(folder), "--tp-size", "2") as server:
        server.wait_ready()
        texts = [QUERY, *DOCUMENTS]
        expected = their_scores(folder, [ids_of(server, text) for text in texts])
        answers = ask(server, "/classify", text=texts).json()
        close([each["embedding"] for each in answers], expected)


@pytest.mark.parametrize("name", ["modernbert_mean_scores", "modernbert_biased"])
def test_two_ranks_share_projections_that_are_stored_as_one(name):
    folder = text_model(name)
    texts = [[5 + i, 70, 9, 100 + i] * (3 * i + 1) for i in range(4)]
    if TEXT_MODELS[name].pooling:
        expected = their_vectors(folder, texts, TEXT_MODELS[name].pooling)
    else:
        expected = their_scores(folder, texts)
    stored = load_file(folder / "model.safetensors")
    options = ("--tp-size", "2", "--dtype", "float32")
    with ServerProcess("--model-path", str(folder), *options) as server:
        server.wait_ready()
        for _ in range(2):
            answers = ask(server, "/encode", input_ids=texts).json()
            close([each["embedding"] for each in answers], expected)
            for projection in ("attn.Wqkv", "mlp.Wi", "mlp.Wo"):
                (weight,) = (k for k in stored if k.endswith(f"layers.1.{projection}.weight"))
                body = {"name": weight, "truncate_size": 70}
                rows = ask(server, "/get_weights_by_name", **body).json()
                close(rows, stored[weight][:70])
            update = ask(server, "/update_weights_from_disk", model_path=str(folder)).json()
            assert update["success"], update


def test_a_model_that_only_generates_says_what_it_lacks():
    server = common_server()
    refused(server, "/v1/rerank", "qwen3-reranker", query="a", documents=["b"])
    refused(server, "/classify", "generates text", text="a")
    refused(server, "/v1/classify", "generates text", input="a")


def test_the_engine():
    with sgl.Engine(model_path=str(text_model("xlm_roberta_scores"))) as engine:
        found = engine.rerank([[QUERY, each] for each in DOCUMENTS])
        expected = pair_scores("xlm_roberta_scores", QUERY, DOCUMENTS)
        close([each["embedding"] for each in found], expected)
        close(engine.encode([[QUERY, DOCUMENTS[0]]])[0]["embedding"], expected[0])
        with pytest.raises(ValueError, match="pair of texts"):
            engine.rerank([["a", "b", "c"]])
        (scores,) = engine.score(query="", items=[QUERY], label_token_ids=[1])
        assert len(scores) == 1
