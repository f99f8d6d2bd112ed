"""Hidden states and prompts as embeddings, over HTTP and in the offline engine."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

import headrace as sgl
from tests.support.native import GREEDY, TEXT, generate, refused, stream, tokenize
from tests.support.server import ServerProcess, running_server
from tests.support.tiny_models import tiny_model

HIDDEN_SIZE = 64
TOLERANCE = 1e-3
SHORT = {**GREEDY, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return running_server(
        "qwen3",
        *("--disable-radix-cache", "--enable-return-hidden-states"),
        *("--chunked-prefill-size", "16", "--random-seed", "5"),
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    made = sgl.Engine(
        model_path=str(tiny_model("qwen3")),
        grammar_backend="none",
        disable_radix_cache=True,
        enable_return_hidden_states=True,
    )
    yield made
    made.shutdown()


@cache
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32).eval()


def expected(tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        found = reference()(torch.tensor([tokens]), output_hidden_states=True)
    return found.hidden_states[-1][0].numpy()


def embeds_of(tokens: list[int]) -> list[list[float]]:
    weight = reference().get_input_embeddings().weight
    return weight[torch.tensor(tokens)].detach().tolist()


def check(answer: dict, prompt: list[int]) -> None:
    hidden = answer["meta_info"]["hidden_states"]
    matrix, *later = hidden
    wanted = expected([*prompt, *answer["output_ids"]][:-1])
    assert np.array(matrix).shape == (len(prompt), HIDDEN_SIZE)
    assert np.array(later).shape == (len(answer["output_ids"]) - 1, HIDDEN_SIZE)
    assert np.abs(np.array([*matrix, *later]) - wanted).max() < TOLERANCE


def test_all_and_last(server):
    prompt = tokenize(server, TEXT)
    answer = generate(server, text=TEXT, return_hidden_states=True, sampling_params=SHORT)
    check(answer, prompt)
    last = generate(server, text=TEXT, return_hidden_states="last", sampling_params=SHORT)
    assert last["meta_info"]["hidden_states"] == pytest.approx(
        answer["meta_info"]["hidden_states"][-1], abs=TOLERANCE
    )
    plain = generate(server, text=TEXT, sampling_params=SHORT)
    assert "hidden_states" not in plain["meta_info"]


def test_a_batch_in_which_some_ask(server):
    texts = [TEXT, "The wheel", "Oats"]
    answers = generate(
        server, text=texts, return_hidden_states=[True, False, "last"], sampling_params=SHORT
    )
    check(answers[0], tokenize(server, texts[0]))
    assert "hidden_states" not in answers[1]["meta_info"]
    assert len(answers[2]["meta_info"]["hidden_states"]) == HIDDEN_SIZE


def test_a_stop_string_ends_the_rows_too(server):
    params = {**SHORT, "max_new_tokens": 16}
    whole = generate(server, text=TEXT, sampling_params=params)["text"]
    stop = whole[len(whole) // 2 :][:2]
    answer = generate(
        server,
        text=TEXT,
        return_hidden_states=True,
        sampling_params={**params, "stop": stop},
    )
    assert answer["meta_info"]["finish_reason"]["matched"] == stop
    check(answer, tokenize(server, TEXT))


def test_streams_bring_them_at_the_end(server):
    for which in (True, "last"):
        events = stream(server, text=[TEXT, "A"], return_hidden_states=which, sampling_params=SHORT)
        for event in events:
            is_last = event["meta_info"]["finish_reason"] is not None
            assert ("hidden_states" in event["meta_info"]) == is_last
            if is_last and which is True:
                check(event, tokenize(server, [TEXT, "A"][event["index"]]))


def test_nothing_to_generate(server):
    answer = generate(
        server, text=TEXT, return_hidden_states=True, sampling_params={"max_new_tokens": 0}
    )
    (matrix,) = answer["meta_info"]["hidden_states"]
    assert np.abs(np.array(matrix) - expected(tokenize(server, TEXT))).max() < TOLERANCE


def test_embeddings_give_what_their_tokens_give(server):
    texts = [TEXT, "The wheel turns."]
    ids = [tokenize(server, text) for text in texts]
    params = {**SHORT, "max_new_tokens": 12}
    wanted = generate(server, input_ids=ids, sampling_params=params)
    given = [embeds_of(each) for each in ids]
    batch = generate(server, input_embeds=given, sampling_params=params)
    assert [each["text"] for each in batch] == [each["text"] for each in wanted]
    one = generate(
        server,
        input_embeds=given[0],
        sampling_params=params,
        return_logprob=True,
        return_hidden_states=True,
    )
    assert one["output_ids"] == wanted[0]["output_ids"]
    assert one["meta_info"]["prompt_tokens"] == len(ids[0])
    assert len(one["meta_info"]["output_token_logprobs"]) == 12
    check(one, ids[0])
    events = stream(server, input_embeds=given[1], sampling_params=params)
    assert events[-1]["text"] == wanted[1]["text"]


def test_wrong_embeddings_are_refused(server):
    row = [0.0] * HIDDEN_SIZE
    for given in ([], [[]], [row[:-1]], [row, [1.0]], [[row], row], [[*row[:-1], 1e39]]):
        assert "input_embeds" in refused(server, input_embeds=given)
    assert refused(server, input_embeds=[["x"] * HIDDEN_SIZE])
    assert "context" in refused(server, input_embeds=[row] * 300)
    body = {"input_embeds": [row], "return_logprob": True, "logprob_start_len": 0}
    assert "log-probabilities" in refused(server, **body)


def test_the_engine_gives_lists_and_takes_arrays(engine):
    (answer,) = engine.generate(
        input_embeds=np.array([embeds_of([9, 8, 7])]),
        sampling_params=SHORT,
        return_hidden_states=True,
    )
    check(answer, [9, 8, 7])
    by_ids = engine.generate(input_ids=[9, 8, 7], sampling_params=SHORT)
    assert by_ids["output_ids"] == answer["output_ids"]
    *_, last = engine.generate("The", SHORT, stream=True, return_hidden_states="last")
    assert len(last["meta_info"]["hidden_states"]) == HIDDEN_SIZE
    two = engine.generate("The", {**SHORT, "n": 2}, return_hidden_states=True)
    assert [len(each["meta_info"]["hidden_states"]) for each in two] == [6, 6]
    with pytest.raises(ValueError, match="Exactly one"):
        engine.generate("The", input_embeds=[[0.0] * HIDDEN_SIZE])


def test_the_engine_s_sessions(engine):
    session = engine.open_session(1000)
    assert engine.open_session(1000, session) is None
    first = engine.generate(input_ids=[9, 8], sampling_params=SHORT, session_params={"id": session})
    follow = {"id": session, "rid": first["meta_info"]["id"]}
    second = engine.generate(input_ids=[7], sampling_params=SHORT, session_params=follow)
    whole = engine.generate(input_ids=[9, 8, *first["output_ids"], 7], sampling_params=SHORT)
    assert second["output_ids"] == whole["output_ids"]
    *_, last = engine.generate(
        input_ids=[7], sampling_params=SHORT, session_params=follow, stream=True
    )
    assert last["meta_info"]["prompt_tokens"] == 2 + 6 + 1
    engine.close_session(session)
    with pytest.raises(ValueError, match="no open session"):
        engine.generate("The", session_params={"id": session})
