"""Prompts and lengths of sentence-transformers folders, and vectors of tokens."""

import base64
import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, processors

import headrace as sgl
from tests.support.server import ServerProcess
from tests.support.tiny_models import edit_json, tiny_bert
from tests.support.tiny_text_models import add_dense, text_model, their_hidden

TEXTS = ["Paris is the capital of France.", "hello", "one two three four"]
PROMPTS = {"query": "What opens the gate? ", "document": "A text: "}
normalize = torch.nn.functional.normalize


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts") / "model"
    shutil.copytree(tiny_bert("bert"), folder)
    written = {"prompts": PROMPTS, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(written))
    # As of most encoders: a token begins a text, and one ends it.
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [("<|endoftext|>", 0), ("<|im_end|>", 2)]
    assert [tokenizer.token_to_id(token) for token, _ in ends] == [each for _, each in ends]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=ends
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(folder / "1_Pooling" / "config.json", include_prompt=False)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    # Else products are rounded where the processor can do that, and vectors with them.
    overrides = json.dumps({"matryoshka_dimensions": [8, 16]})
    options = ("--dtype", "float32", "--json-model-override-args", overrides)
    with ServerProcess("--model-path", str(folder), *options) as process:
        yield process.wait_ready()


def ask(server, path, **body):
    return server.client.post(path, json=body, timeout=60)


def close(found, expected):
    torch.testing.assert_close(torch.tensor(found), expected, atol=5e-5, rtol=5e-5)


def vector(folder, text, prompt):
    """The mean of the text's tokens and the last one, of those that the prompt is ahead of."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    hidden = their_hidden(folder, ids(prompt + text).ids)
    # All of the prompt's tokens but the one that ends a text.
    skipped = len(ids(prompt).ids) - 1 if prompt else 0
    assert not prompt or skipped > 3
    return normalize(hidden[skipped:].mean(dim=0), dim=-1)


def vectors(answer):
    return [each["embedding"] for each in answer.json()]


def test_prompts_of_the_folder_and_of_the_request(server, folder):
    for asked, prompt in (
        ({}, PROMPTS["document"]),
        ({"prompt_name": "query"}, PROMPTS["query"]),
        ({"prompt": "Something else: "}, "Something else: "),
        ({"prompt": ""}, ""),
    ):
        expected = torch.stack([vector(folder, text, prompt) for text in TEXTS])
        close(vectors(ask(server, "/encode", text=TEXTS, **asked)), expected)
        answer = ask(server, "/v1/embeddings", input=TEXTS, **asked).json()
        close([each["embedding"] for each in answer["data"]], expected)
        pooled = ask(server, "/pooling", input=TEXTS, **asked).json()
        close([each["data"] for each in pooled["data"]], expected)
    # Ids are taken as they are.
    ids = ask(server, "/tokenize", prompt=TEXTS[0]).json()["tokens"]
    close(vectors(ask(server, "/encode", input_ids=[ids])), vector(folder, TEXTS[0], "")[None])


def test_lengths_of_the_folder(server, folder):
    full = torch.stack([vector(folder, text, PROMPTS["document"]) for text in TEXTS])
    for size in (8, 16, 32):
        expected = normalize(full[:, :size], dim=-1)
        close(vectors(ask(server, "/encode", text=TEXTS, dimensions=size)), expected)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/encode", {"text": "a", "prompt_name": "passage"}, "one of query, document; got"),
        ("/encode", {"text": "a", "prompt_name": "query", "prompt": "b"}, "not both"),
        ("/encode", {"input_ids": [5, 6], "prompt_name": "query"}, "token ids must include it"),
        ("/encode", {"text": ["a"] * 2048, "prompt": "b" * 20_000}, "characters together"),
        ("/encode", {"text": "a", "prompt": "b " * 200}, "context length"),
        ("/v1/embeddings", {"input": "a", "prompt_name": 5}, "prompt_name"),
        ("/encode", {"text": "a", "dimensions": 12}, "one of 8, 16"),
        ("/encode", {"text": "a", "dimensions": 0}, "one of 8, 16"),
        ("/pooling", {"input": "a", "task": "token_embed", "dimensions": 8}, "32 for vectors"),
        ("/pooling", {"input": "a", "task": "classify"}, "scores texts"),
        ("/pooling", {"input": "a", "task": "plan"}, "task"),
        ("/pooling", {"input": []}, "1 to 2048"),
        ("/pooling", {"input": ["a", [5]]}, "input"),
        ("/pooling", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_what_is_wrong_is_a_400_that_says_so(server, path, body, named):
    answer = ask(server, path, **body)
    assert answer.status_code == 400, answer.text
    assert named in answer.text


def test_vectors_of_tokens(server, folder):
    ids = [ask(server, "/tokenize", prompt=text).json()["tokens"] for text in TEXTS]
    expected = [normalize(their_hidden(folder, each), dim=-1) for each in ids]
    asked = {"input": TEXTS, "task": "token_embed", "prompt": ""}
    answer = ask(server, "/pooling", **asked).json()
    assert answer["object"] == "list"
    assert answer["id"].startswith("pool-")
    assert answer["usage"]["total_tokens"] == sum(map(len, ids))
    for index, (each, rows) in enumerate(zip(answer["data"], expected, strict=True)):
        assert (each["index"], each["object"]) == (index, "pooling")
        close(each["data"], rows)
    raw = ask(server, "/pooling", **asked, encoding_format="base64").json()["data"]
    for each, rows in zip(raw, expected, strict=True):
        packed = torch.frombuffer(bytearray(base64.b64decode(each["data"])), dtype=torch.float32)
        close(packed.reshape(-1, 32).tolist(), rows)
    # A prompt's tokens have theirs.
    (asking,) = ask(server, "/pooling", input=TEXTS[1], task="token_embed").json()["data"]
    assert len(asking["data"]) > len(expected[1]) + 2


def test_vectors_of_tokens_among_others(server, folder):
    """Some requests of a step ask for a text's vector, others for its tokens'."""
    ids = [ask(server, "/tokenize", prompt=text).json()["tokens"] for text in TEXTS]
    many = [ids[i % 3] for i in range(60)]
    answer = ask(server, "/pooling", input=many, task="token_embed").json()["data"]
    rows = [normalize(their_hidden(folder, each), dim=-1) for each in ids]
    for index, each in enumerate(answer):
        close(each["data"], rows[index % 3])


def test_an_answer_that_would_weigh_too_much_is_refused_before_it_is_computed(tmp_path):
    folder = add_dense(text_model("modernbert"), tmp_path / "model", [4096])
    # Without pooling the dense layer is for each token, as late interaction has it.
    modules = json.loads((folder / "modules.json").read_text())
    kept = [each for each in modules if "Pooling" not in each["type"]]
    (folder / "modules.json").write_text(json.dumps(kept))
    with sgl.Engine(model_path=str(folder)) as engine, pytest.raises(ValueError, match="/pooling"):
        engine.encode("hello")
    with ServerProcess("--model-path", str(folder), "--dtype", "float32") as server:
        server.wait_ready()
        assert ask(server, "/encode", text="a").status_code == 400
        ids = [5 + i for i in range(20)]
        (found,) = ask(server, "/pooling", input=ids).json()["data"]
        close(found["data"], late_interaction(folder, ids))
        answer = ask(server, "/pooling", input=[[5] * 120] * 100)
        assert answer.status_code == 400
        assert "33554432" in answer.text
        assert "token_vectors" in answer.text
        assert "fewer or shorter texts" in answer.text
        (load,) = server.client.get("/v1/loads").json()["loads"]
        assert load["num_total_reqs"] == load["num_used_tokens"] == 0


def late_interaction(folder, ids):
    from safetensors.torch import load_file

    weights = load_file(folder / "2_Dense" / "model.safetensors")
    hidden = their_hidden(folder, ids)
    dense = torch.nn.functional.linear(hidden, weights["linear.weight"], weights["linear.bias"])
    return normalize(dense.tanh(), dim=-1)
