"""The native API's check list: each test is the check of that number, over HTTP alone."""

import concurrent.futures
import itertools
import json
import math
import re
import time

import httpx
import pytest

from tests.support.grammar_backends import needs_grammars
from tests.support.native import (
    GREEDY,
    TEXT,
    generate,
    load,
    refused,
    slowed,
    stream,
    tokenize,
    until_idle,
)
from tests.support.server import ServerProcess, common_server, running_server
from tests.support.tiny_models import IM_END_ID, VOCAB_SIZE

SHORT = {**GREEDY, "max_new_tokens": 6}
# Beside other work in the batch the last bits differ.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return common_server()


def scored(server: ServerProcess, **body) -> dict:
    asked = {"text": TEXT, "return_logprob": True, "sampling_params": SHORT, **body}
    return generate(server, **asked)


def values(triples: list) -> list[float]:
    return [triple[0] for triple in triples]


# ---- shapes ----


def test_check_07_shapes(server):
    params = {**GREEDY, "max_new_tokens": 3}
    one = generate(server, text="The wheel", sampling_params=params)
    assert isinstance(one, dict)
    listed = generate(server, text=["The wheel"], sampling_params=params)
    assert [each["text"] for each in listed] == [one["text"]]
    assert [each["output_ids"] for each in generate(server, input_ids=[[9, 8]])] != []
    two = generate(server, text=["The wheel", "Barley"], sampling_params=params)
    assert two[0]["text"] == one["text"]
    assert two[0]["meta_info"]["prompt_tokens"] == one["meta_info"]["prompt_tokens"]
    assert len(generate(server, text="The wheel", sampling_params={**params, "n": 3})) == 3
    four = generate(server, text=["The wheel", "Barley"], sampling_params={**params, "n": 2})
    assert [each["text"] for each in four] == [two[0]["text"]] * 2 + [two[1]["text"]] * 2
    assert len({each["meta_info"]["id"] for each in four}) == 4


def test_check_08_the_default_length(server):
    answer = generate(server, text="The", sampling_params={"ignore_eos": True})
    assert answer["meta_info"]["completion_tokens"] == 128
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 128}


def test_check_09_nothing_to_generate(server):
    answer = generate(server, text="The wheel", sampling_params={"max_new_tokens": 0})
    assert answer["text"] == ""
    assert answer["output_ids"] == []
    assert answer["meta_info"]["completion_tokens"] == 0
    assert answer["meta_info"]["prompt_tokens"] == len(tokenize(server, "The wheel"))
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    # What would come next is scored all the same.
    for params in ({"max_new_tokens": 0, "temperature": 0}, {"max_new_tokens": 0, "n": 2}):
        answers = scored(server, text="The wheel", sampling_params=params, top_logprobs_num=2)
        for each in answers if isinstance(answers, list) else [answers]:
            assert (each["text"], each["output_ids"]) == ("", [])
            assert each["meta_info"]["completion_tokens"] == 0
            (triple,) = each["meta_info"]["output_token_logprobs"]
            assert 0 <= triple[1] < VOCAB_SIZE
            assert triple[0] <= 0
            assert len(each["meta_info"]["output_top_logprobs"]) == 1
    following = scored(server, text="The wheel", sampling_params={**GREEDY, "max_new_tokens": 1})
    first = scored(
        server, text="The wheel", sampling_params={"max_new_tokens": 0, "temperature": 0}
    )["meta_info"]["output_token_logprobs"]
    assert first[0][1] == following["output_ids"][0]


def test_check_10_ids_and_text_give_the_same(server):
    ids = tokenize(server, TEXT)
    params = {**GREEDY, "max_new_tokens": 8}
    by_text = generate(server, text=TEXT, sampling_params=params)
    by_ids = generate(server, input_ids=ids, sampling_params=params)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_ids["meta_info"]["prompt_tokens"] == len(ids)


def test_check_11_the_prefix_cache_shows_and_flushes(server):
    until_idle(server)
    assert server.client.post("/flush_cache").status_code == 200
    body = {"text": TEXT, "sampling_params": {**GREEDY, "max_new_tokens": 4}}
    cold, warm = generate(server, **body), generate(server, **body)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] > 0
    assert cold["output_ids"] == warm["output_ids"]
    for name in ("extra_key", "cache_salt"):
        other = generate(server, **body, **{name: "tenant"})
        assert other["meta_info"]["cached_tokens"] == 0
        assert other["output_ids"] == cold["output_ids"]
    until_idle(server)
    assert server.client.get("/flush_cache").status_code == 200
    assert generate(server, **body)["meta_info"]["cached_tokens"] == 0


def test_check_12_names(server):
    answers = generate(server, text=["The", "A"], rid="a", sampling_params=SHORT)
    assert [each["meta_info"]["id"] for each in answers] == ["a_0", "a_1"]
    assert generate(server, text="The", rid="b", sampling_params=SHORT)["meta_info"]["id"] == "b"
    params = {"max_new_tokens": 250, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with slowed(server):
            task = pool.submit(
                generate, server, text=["The"] * 8, rid="twice", sampling_params=params
            )
            while not load(server)["num_running_reqs"]:
                assert not task.done()
            assert "already in flight" in refused(server, text="A", rid="twice_0")
        assert len(task.result()) == 8
    assert "rid" in refused(server, text=["The", "A"], rid=["same", "same"])


def test_check_13_stop_strings_and_patterns(server):
    params = {**GREEDY, "max_new_tokens": 24}
    whole = generate(server, text="The", sampling_params=params)["text"]
    stop = whole[len(whole) // 2 :][:3]
    where = whole.index(stop)
    for given in ({"stop": stop}, {"stop_regex": re.escape(stop)}):
        (matched,) = given.values()
        cut = generate(server, text="The", sampling_params={**params, **given})
        assert cut["text"] == whole[:where]
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
        kept = generate(
            server, text="The", sampling_params={**params, **given, "no_stop_trim": True}
        )
        assert kept["text"] == whole[: where + len(stop)]
        for event in stream(server, text="The", sampling_params={**params, **given}):
            assert whole[:where].startswith(event["text"])
    for pattern in ("(", "a*", r"(a)\1", "a{9999}", "a" * 300):
        message = refused(server, text="The", sampling_params={"stop_regex": [pattern]})
        assert message.startswith("stop_regex")


def test_check_14_stop_token_ids(server):
    params = {"temperature": 0, "max_new_tokens": 24}
    ids = generate(server, text="The", sampling_params={**params, "ignore_eos": True})["output_ids"]
    token = ids[5]
    cut = generate(server, text="The", sampling_params={**params, "stop_token_ids": [token]})
    assert cut["output_ids"] == ids[: ids.index(token) + 1]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert cut["meta_info"]["completion_tokens"] == ids.index(token) + 1
    before = generate(
        server, text="The", sampling_params={**GREEDY, "max_new_tokens": ids.index(token)}
    )
    assert cut["text"] == before["text"]
    through = {**params, "stop_token_ids": [token], "ignore_eos": True}
    assert generate(server, text="The", sampling_params=through)["output_ids"] == ids


def test_check_15_min_new_tokens(server):
    ends_early = {"temperature": 0, "logit_bias": {str(IM_END_ID): 100}}
    answer = generate(server, text="The", sampling_params=ends_early)
    assert answer["output_ids"] == [IM_END_ID]
    answer = generate(server, text="The", sampling_params={**ends_early, "min_new_tokens": 20})
    assert answer["meta_info"]["completion_tokens"] == 21
    assert "min_new_tokens" in refused(
        server, text="The", sampling_params={"min_new_tokens": 5, "max_new_tokens": 4}
    )


@needs_grammars
def test_check_16_structured_output(server):
    def text(**constraint) -> str:
        params = {"max_new_tokens": 60, "sampling_seed": 3, **constraint}
        answer = generate(server, text="The", sampling_params=params)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        return answer["text"]

    assert re.fullmatch("[a-c]{4}", text(regex="[a-c]{4}"))
    # A value in which JSON allows no white space: a random model would fill a long time with it.
    assert json.loads(text(json_schema='{"enum": ["left", "right", 7]}')) in ("left", "right", 7)
    assert text(ebnf='root ::= "yes" | "no"') in ("yes", "no")
    refused(server, text="The", sampling_params={"regex": "a", "ebnf": 'root ::= "a"'})
    refused(server, text="The", sampling_params={"regex": "(("})
    assert re.fullmatch("a{3}", text(regex="a{3}"))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": 0},
        {"min_p": 2},
        {"frequency_penalty": 3},
        {"repetition_penalty": 3},
        {"unheard_of": 1},
        {"max_new_tokens": -1},
        {"max_new_tokens": 2**63},
        {"stop_token_ids": [VOCAB_SIZE]},
        {"logit_bias": {str(VOCAB_SIZE): 1}},
        {"logit_bias": {"x": 1}},
        {"n": 0},
        {"n": 10**9},
        {"stop": ["x"] * 1000},
        {"stop_regex": ["x"] * 33},
        {"top_k": True},
        {"temperature": "1"},
        {"sampling_seed": 2**70},
        {"custom_params": 5},
    ],
)
def test_check_17_sampling_out_of_bounds(server, params):
    assert refused(server, text="The", sampling_params=params)


def test_check_17_sampling_within_bounds(server):
    for params in (
        {"temperature": 0},
        {"top_k": -1, "top_p": 1, "min_p": 0},
        {"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 2},
        {"custom_params": {"anything": [1, {"a": None}]}},
        {"stop": None, "stop_regex": [], "stop_token_ids": [], "regex": None, "n": 1},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    ):
        generate(server, text="The", sampling_params={**params, "max_new_tokens": 2})


def test_check_18_logit_bias_decides(server):
    params = {"temperature": 0, "max_new_tokens": 1, "logit_bias": {"77": 100}}
    assert generate(server, text="The", sampling_params=params)["output_ids"] == [77]


def test_check_19_prompts_that_are_none(server):
    for body in (
        {},
        {"text": "a", "input_ids": [1], "input_embeds": [[0.0]]},
        {"input_ids": []},
    ):
        response = server.client.post("/generate", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]


def test_check_20_unknown_keys_are_ignored(server):
    assert generate(server, text="The", sampling_params=SHORT, unheard_of={"a": 1})["output_ids"]


def test_check_21_what_the_server_was_not_started_for(server):
    message = refused(server, input_embeds=[[0.0] * 64])
    assert "--disable-radix-cache" in message
    assert "lora_path" in refused(server, text="The", lora_path="adapter")
    for which in (True, "last"):
        message = refused(server, text="The", return_hidden_states=which)
        assert "--enable-return-hidden-states" in message


# ---- log-probabilities ----


def test_check_22_output_only(server):
    answer = scored(server)
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == []
    triples = meta["output_token_logprobs"]
    assert len(triples) == meta["completion_tokens"] == 6
    assert [triple[1] for triple in triples] == answer["output_ids"]
    assert all(triple[2] is None for triple in triples)
    assert all(math.isfinite(value) and value <= 0 for value in values(triples))


def test_check_23_input_from_a_start(server):
    whole = None
    for start in (0, 1, 7, 16, 17):
        meta = scored(server, logprob_start_len=start)["meta_info"]
        triples = meta["input_token_logprobs"]
        assert len(triples) == meta["prompt_tokens"] - start
        assert triples[0][0] is None
        whole = whole or triples
        assert values(triples[1:]) == pytest.approx(values(whole[start + 1 :]), abs=TOLERANCE)
        assert [each[1] for each in triples] == tokenize(server, TEXT)[start:]


def test_check_24_most_probable(server):
    meta = scored(server, logprob_start_len=0, top_logprobs_num=5)["meta_info"]
    assert meta["input_top_logprobs"][0] is None
    for triples in [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]:
        assert len(triples) == 5
        assert values(triples) == sorted(values(triples), reverse=True)
    best = [triples[0] for triples in meta["output_top_logprobs"]]
    assert best == meta["output_token_logprobs"]


def test_check_25_asked_for(server):
    meta = scored(server, logprob_start_len=0, token_ids_logprob=[9, 3])["meta_info"]
    assert meta["input_token_ids_logprobs"][0] is None
    found = [*meta["input_token_ids_logprobs"][1:], *meta["output_token_ids_logprobs"]]
    assert len(found) == meta["prompt_tokens"] - 1 + meta["completion_tokens"]
    assert all([triple[1] for triple in triples] == [9, 3] for triples in found)


def test_check_26_scores_agree(server):
    first = scored(server)
    prompt = tokenize(server, TEXT)
    again = generate(
        server,
        input_ids=prompt + first["output_ids"],
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
        sampling_params={"max_new_tokens": 0},
    )
    generated = values(first["meta_info"]["output_token_logprobs"])
    triples = again["meta_info"]["input_token_logprobs"]
    assert [triple[1] for triple in triples[1:]] == first["output_ids"]
    assert values(triples[1:]) == pytest.approx(generated, abs=TOLERANCE)


def test_check_27_a_start_behind_the_prompt(server):
    message = refused(server, text="The", return_logprob=True, logprob_start_len=1000)
    assert "logprob_start_len" in message


# ---- streams ----


def test_check_28_streams_are_cumulative(server):
    params = {**GREEDY, "max_new_tokens": 40}
    whole = generate(server, text=TEXT, sampling_params=params)
    # Pieces that wait for the front are joined; slow steps leave it time for each.
    with slowed(server, 0.1):
        events = stream(server, text=TEXT, sampling_params=params)
    assert len(events) > 10
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}


def test_check_29_batched_streams(server):
    prompts, params = ["The wheel", "barley"], {**GREEDY, "max_new_tokens": 12}
    whole = generate(server, text=prompts, sampling_params=params)
    last = {each["index"]: each for each in stream(server, text=prompts, sampling_params=params)}
    assert [last[index]["text"] for index in (0, 1)] == [each["text"] for each in whole]


LONGER_THAN_CONTEXT = "is longer than the model's context length"
MORE_THAN_CONTEXT = "Requested token count exceeds the model's maximum context length"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": TEXT * 20}, LONGER_THAN_CONTEXT),
        # So long that nobody tokenizes it.
        ({"text": "x" * 100_000}, LONGER_THAN_CONTEXT),
        ({"input_ids": [7] * 256}, LONGER_THAN_CONTEXT),
        ({"text": "The", "sampling_params": {"max_new_tokens": 256}}, MORE_THAN_CONTEXT),
        ({"text": ["The", TEXT * 20, "A"]}, LONGER_THAN_CONTEXT),
        ({"text": TEXT * 20, "sampling_params": {"n": 2}}, LONGER_THAN_CONTEXT),
    ],
)
def test_check_30_too_long_is_said_in_the_stream(server, body, message):
    (event,) = stream(server, **body)
    error = event["error"]
    assert message in error.pop("message")
    assert error == {"type": "BadRequest", "code": 400, "retryable": False}
    assert message in refused(server, **body)
    # The neighbours in the batch were taken back.
    until_idle(server)


def test_check_30_too_long_for_the_pool():
    small = running_server("qwen3", "--max-total-tokens", "128")
    for body in (
        {"input_ids": [7] * 128},
        {"text": "The", "sampling_params": {"max_new_tokens": 128}},
    ):
        (event,) = stream(small, **body)
        assert "KV pool" in event["error"]["message"]
        assert event["error"]["code"] == 400
        assert "KV pool" in refused(small, **body)


def test_check_30_other_mistakes_keep_their_status(server):
    for body in (
        {"text": TEXT * 20, "sampling_params": {"top_p": 7}},
        {"input_ids": [VOCAB_SIZE]},
        {"text": "The", "sampling_params": {"min_new_tokens": 300}},
    ):
        assert refused(server, **body, stream=True)


@pytest.mark.parametrize("streaming", [True, False])
def test_check_31_a_client_that_leaves_frees_its_place(server, streaming):
    params = {"max_new_tokens": 250, "ignore_eos": True}
    body = {"text": "The", "stream": streaming, "sampling_params": params}
    # Slowed down, so that nobody could have come to the end by then: 250 steps take 25 s.
    server.client.post("/slow_down", json={"forward_sleep_time": 0.1}).raise_for_status()
    try:
        with httpx.Client(base_url=server.url, timeout=30 if streaming else 1.0) as client:
            started_at = time.monotonic()
            if streaming:
                with client.stream("POST", "/generate", json=body) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.TimeoutException):
                    client.post("/generate", json={**body, "text": ["The"] * 64})
        until_idle(server)
        assert time.monotonic() - started_at < 20
    finally:
        server.client.post("/slow_down", json={}).raise_for_status()


# ---- sessions ----


def test_check_57_sessions(server):
    response = server.client.post("/open_session", json={"capacity_of_str_len": 1000})
    assert response.status_code == 200
    session = response.json()
    assert isinstance(session, str)
    first = generate(server, text=TEXT, session_params={"id": session}, sampling_params=SHORT)
    rid = first["meta_info"]["id"]
    follow = {"text": " And then", "sampling_params": SHORT}
    second = generate(server, session_params={"id": session, "rid": rid}, **follow)
    prompt = [*tokenize(server, TEXT), *first["output_ids"], *tokenize(server, " And then")]
    assert second["meta_info"]["prompt_tokens"] == len(prompt)
    assert second["meta_info"]["cached_tokens"] > 0
    whole = generate(server, input_ids=prompt, sampling_params=SHORT)
    assert second["output_ids"] == whole["output_ids"]
    events = stream(server, session_params={"id": session, "rid": rid, "replace": True}, **follow)
    assert events[-1]["output_ids"] == whole["output_ids"]
    # The second one was replaced by the stream, from which one may go on.
    gone = {"id": session, "rid": second["meta_info"]["id"]}
    assert "no request" in refused(server, session_params=gone, **follow)
    third = generate(
        server,
        input_ids=[],
        session_params={"id": session, "rid": events[-1]["meta_info"]["id"]},
        sampling_params=SHORT,
    )
    assert third["meta_info"]["prompt_tokens"] == len(prompt) + 6

    assert "no open session" in refused(server, session_params={"id": "unknown"}, **follow)
    taken = {"capacity_of_str_len": 10, "session_id": session}
    assert server.client.post("/open_session", json=taken).status_code == 400
    assert server.client.post("/open_session", json={}).status_code == 400
    for _ in range(2):
        closed = server.client.post("/close_session", json={"session_id": session})
        assert (closed.status_code, closed.content) == (200, b"")
    assert "no open session" in refused(server, session_params={"id": session}, **follow)


def test_check_57_a_request_that_still_runs_is_no_beginning(server):
    session = server.client.post("/open_session", json={"capacity_of_str_len": 1000}).json()
    params = {"max_new_tokens": 200, "ignore_eos": True}
    body = {"text": "The", "session_params": {"id": session}, "rid": "long", "stream": True}
    joins = {"text": "A", "session_params": {"id": session, "rid": "long"}}
    with server.client.stream(
        "POST", "/generate", json={**body, "sampling_params": params}
    ) as answer:
        next(answer.iter_lines())
        other = server.client.post("/generate", json=joins)
        if other.status_code == 400:
            assert "not finished" in other.text
    # Its client is gone: what it had generated by then is what others go on from.
    deadline = time.monotonic() + 60
    while (code := server.client.post("/generate", json=joins).status_code) != 200:
        assert code == 400
        assert time.monotonic() < deadline
    # One that was refused leaves no trace.
    assert "context" in refused(
        server, text=TEXT * 20, session_params={"id": session}, rid="too-long"
    )
    several = {"text": ["A", TEXT * 20], "rid": "several", "session_params": {"id": session}}
    assert "context" in refused(server, **several)
    for rid in ("too-long", "several_0"):
        gone = {"id": session, "rid": rid}
        assert "no request" in refused(server, text="A", session_params=gone)
