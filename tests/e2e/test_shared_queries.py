"""Many texts behind one query, by a model that generates: the query is computed once."""

import math

import pytest
from tokenizers import Tokenizer

import headrace as sgl
from openai_api.chat_template import load_chat_template
from runtime.service.reranking import DEFAULT_INSTRUCTION
from tests.support.server import ServerProcess
from tests.support.tiny_models import copy_of, edit_json, tiny_model

PAGE = 16
QUERY = "Does the text below say what the miller opens, and when he does it, and for whom? " * 2
ITEMS = [f" The miller of mill number {i} opens gate {7 * i} at {i} o'clock." for i in range(24)]
TEMPLATE = "qwen3-reranker"


def once(lengths, num_shared):
    """What one pass with delimiters would compute; a page at most is computed again for an item."""
    return num_shared + sum(length - num_shared + PAGE for length in lengths)


def test_items_are_branches_behind_a_query_that_is_computed_once():
    with sgl.Engine(model_path=str(tiny_model("qwen3")), page_size=PAGE) as engine:
        ids = Tokenizer.from_file(str(tiny_model("qwen3") / "tokenizer.json")).encode
        lengths = [len(ids(QUERY + item).ids) for item in ITEMS]
        num_query = len(ids(QUERY).ids)
        assert num_query > 4 * PAGE
        total = engine.context.status.total
        wanted = {"query": QUERY, "label_token_ids": [5, 9, 70]}
        before = total("prompt_tokens_total") - total("cached_tokens_total")
        together = engine.score(items=ITEMS, **wanted)
        computed = total("prompt_tokens_total") - total("cached_tokens_total") - before
        assert computed <= once(lengths, num_query)
        assert computed < sum(lengths) / 2
        for item, found in list(zip(ITEMS, together, strict=True))[::6]:
            engine.flush_cache()
            (alone,) = engine.score(items=[item], **wanted)
            assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, alone, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = copy_of("qwen3", tmp_path_factory.mktemp("asked") / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(folder / "config.json", max_position_embeddings=512)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    options = ["--chat-template", TEMPLATE, "--enable-metrics", "--page-size", str(PAGE)]
    with ServerProcess("--model-path", str(folder), *options) as server:
        yield server.wait_ready()


def ask(server, path, **body):
    answer = server.client.post(path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompts_of(instruction, query, documents):
    template = load_chat_template(TEMPLATE, None, {})
    roles = ("system", "query", "document")
    return [
        template.render(
            [
                {"role": role, "content": content}
                for role, content in zip(roles, (instruction, query, each), strict=True)
            ]
        )
        for each in documents
    ]


def test_documents_are_branches_behind_the_query(server, folder):
    query = "What does he open?"
    before = counters(server)
    assert len(ask(server, "/v1/rerank", query=query, documents=ITEMS)) == len(ITEMS)
    prompts, cached = (b - a for a, b in zip(before, counters(server), strict=True))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = prompts_of(DEFAULT_INSTRUCTION, query, ITEMS)
    lists = [tokenizer.encode(text).ids for text in texts]
    assert prompts == sum(map(len, lists))
    num_shared = next(i for i, each in enumerate(zip(*lists, strict=False)) if len({*each}) > 1)
    assert num_shared > 4 * PAGE
    assert prompts - cached <= once(list(map(len, lists)), num_shared)


def counters(server):
    """Tokens of prompts so far, and those of them that were cached."""
    found = {}
    for line in server.client.get("/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#"):
            found[name.partition("{")[0]] = float(value)
    return [found.get(f"sglang:{kind}_tokens_total", 0.0) for kind in ("prompt", "cached")]


def test_a_model_that_is_asked_for_yes_or_no(server):
    query, documents = "What does the miller open?", [ITEMS[0], "Paris is a capital.", "0 1 2"]
    answers = ask(server, "/v1/rerank", query=query, documents=documents)
    prompts = prompts_of("Find it", query, documents)
    assert all(
        f"<Document>: {each}<|im_end|>" in p for each, p in zip(documents, prompts, strict=True)
    )
    labels = [ask(server, "/tokenize", prompt=word)["tokens"][0] for word in ("yes", "no")]
    body = {"items": prompts, "label_token_ids": labels, "apply_softmax": True}
    expected = [each[0] for each in ask(server, "/v1/score", **body)["scores"]]
    found = {"query": query, "documents": documents, "instruct": "Find it"}
    instructed = ask(server, "/v1/rerank", **found)
    scores = [each["score"] for each in instructed]
    assert scores == sorted(scores, reverse=True)
    for each in instructed:
        assert math.isclose(each["score"], expected[each["index"]], abs_tol=1e-5)
    assert len(answers) == 3
    # A probability is a relevance as it is.
    relevant = ask(server, "/v2/rerank", **found)
    assert [(each["index"], each["relevance_score"]) for each in relevant["results"]] == [
        (each["index"], pytest.approx(each["score"], abs=1e-5)) for each in instructed
    ]
    assert relevant["usage"]["total_tokens"] > 3
    assert {each["index"]: each["score"] for each in answers} != {
        each["index"]: each["score"] for each in instructed
    }
