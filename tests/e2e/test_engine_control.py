"""The offline engine besides generation: scores, profiles, changes while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import headrace as sgl
from tests.support.offline import FRANCE, JAPAN, LONG, PLAIN, SHORT, is_idle, slowed
from tests.support.waiting import until, until_in_loop

QUERY = "The capital of France is"
ITEMS = [" Paris. It is", " Lyon. It is", " a"]


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine(**PLAIN) as engine:
        yield engine


def ids_of(engine: sgl.Engine, text: str) -> list[int]:
    return engine.context.tokenizer.encode(text)


# ---- T74 ----------------------------------------------------------------------------------------


def test_scores(engine):
    labels = [ids_of(engine, word)[0] for word in (" Paris", " Tokyo")]
    plain = engine.score(QUERY, ITEMS, labels)
    assert [len(row) for row in plain] == [2, 2, 2]
    assert all(0 <= each <= 1 for row in plain for each in row)
    soft = engine.score(QUERY, ITEMS, labels, apply_softmax=True)
    for mine, whole in zip(soft, plain, strict=True):
        assert sum(mine) == pytest.approx(1)
        assert mine == pytest.approx([each / sum(whole) for each in whole], rel=1e-4)
    # A list of lists, and an object for newer callers.
    assert plain == plain.scores
    assert plain.prompt_tokens == sum(len(ids_of(engine, QUERY + item)) for item in ITEMS)
    # What generation itself says of the next token.
    ((paris, tokyo),) = engine.score(QUERY, "", labels)
    chosen = engine.generate(QUERY, {**SHORT, "max_new_tokens": 1}, return_logprob=True)
    assert paris > 0.9 > 0.1 > tokyo
    assert chosen["output_ids"] == [labels[0]]


def test_choices_are_scored_at_exact_borders(engine):
    words = ["London", "Paris", "Berlin"]
    for prompt, choices in ((QUERY, [f" {word}" for word in words]), (QUERY + " ", words)):
        found = engine.select(prompt, choices)
        assert max(found["choices"], key=lambda each: each["logprob"]) is found["choices"][1]
        assert found["choices"][1]["prob"] > 0.9
        assert asyncio.run(engine.async_select(prompt, choices))["choices"] == found["choices"]
        direct = engine.generate(
            [prompt + each for each in choices],
            {**SHORT, "max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        for mine, whole in zip(found["choices"], direct, strict=True):
            known = whole["meta_info"]["input_token_logprobs"]
            own = mine["token_logprobs"]
            assert [each[1] for each in own] == [each[1] for each in known[-len(own) :]]
            for (value, *_), (wanted, *_) in zip(own, known[-len(own) :], strict=True):
                assert value == pytest.approx(wanted, abs=1e-3)
    with pytest.raises(ValueError, match="1 to 1000 entries"):
        engine.select(QUERY, [])
    with pytest.raises(ValueError, match="Exactly one of"):
        engine.select(choices=["a"])


def test_scores_of_ids_equal_those_of_texts(engine):
    labels = [11, 12]
    query, items = "Numbers: 1 2", [" 3", " 4 5"]
    query_ids, item_ids = ids_of(engine, query), [ids_of(engine, item) for item in items]
    for item, ids in zip(items, item_ids, strict=True):
        assert ids_of(engine, query + item) == query_ids + ids, "the border is one of tokens"
    text = engine.score(query, items, labels)
    ids = engine.score(query_ids, item_ids, labels)
    for mine, theirs in zip(text, ids, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    turned = engine.score(query=" 7", items=["Sum", "Two"], label_token_ids=labels, item_first=True)
    ahead = engine.score(items=["Sum 7", "Two 7"], label_token_ids=labels)
    for mine, theirs in zip(turned, ahead, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert asyncio.run(engine.async_score(query, items, labels)) == text
    assert engine.score(query, [], labels) == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"query": "a", "items": ["b"]}, "label_token_ids must name"),
        ({"query": "a", "items": ["b"], "label_token_ids": [10**6]}, "label_token_ids must be in"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "must both be texts"),
        ({"query": "a", "label_token_ids": [1]}, "items must be given"),
        ({"query": "a", "items": 5, "label_token_ids": [1]}, "Expected"),
    ],
)
def test_what_cannot_be_scored(engine, call, words):
    with pytest.raises(ValueError, match=words):
        engine.score(**call)
    with pytest.raises(ValueError, match=words):
        asyncio.run(engine.async_score(**call))
    # The worker tells a little later that the request before has ended.
    until(lambda: is_idle(engine))


async def test_a_cancelled_score_ends(engine):
    long = [f"{QUERY} {number} " * 200 for number in range(40)]
    task = asyncio.create_task(engine.async_score("", long, [5]))
    until_busy = asyncio.create_task(asyncio.to_thread(until, lambda: not is_idle(engine)))
    await until_busy
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until, lambda: is_idle(engine))


# ---- profiles and changes -----------------------------------------------------------------------


def test_a_profile(engine, tmp_path):
    engine.start_profile(output_dir=str(tmp_path), profile_id="e", with_stack=False)
    with pytest.raises(ValueError, match="already running"):
        engine.start_profile(output_dir=str(tmp_path))
    engine.generate(FRANCE, SHORT)
    engine.stop_profile()
    assert (tmp_path / "e-TP-0.trace.json.gz").stat().st_size > 1000
    with pytest.raises(ValueError, match="No profile is running"):
        engine.stop_profile()
    with pytest.raises(TypeError, match=r"'num_step'.*'num_steps'"):
        engine.start_profile(num_step=3)


def test_small_changes(engine):
    engine.freeze_gc()
    assert engine.set_internal_state({"decode_log_interval": 7}) == [True]
    assert engine.get_server_info()["decode_log_interval"] == 7
    assert engine.set_internal_state({"pp_max_micro_batch_size": 7}) == [False]
    with pytest.raises(ValueError, match="cannot change"):
        engine.set_internal_state({"model_path": 1})
    assert engine.generate(FRANCE, SHORT)["text"].startswith(" Paris")


# ---- what frameworks reach for ------------------------------------------------------------------


def test_scheduler_info(engine):
    info = engine.scheduler_info
    whole = engine.get_server_info()
    assert info == {name: whole[name] for name in info}
    assert info["status"] == "ready"
    assert info["max_total_num_tokens"] > 0
    longest = [5] * info["max_req_input_len"]
    assert engine.generate(input_ids=longest, sampling_params={"max_new_tokens": 1})["output_ids"]
    with pytest.raises(ValueError, match="tokens"):
        engine.generate(input_ids=[*longest, 5], sampling_params={"max_new_tokens": 1})


def test_the_tokenizer_manager_tokenizes_and_aborts(engine):
    manager = engine.tokenizer_manager
    ids = manager.tokenizer.encode(FRANCE)
    assert manager.tokenizer.decode(ids, skip_special_tokens=True) == FRANCE
    assert engine.generate(FRANCE, SHORT)["meta_info"]["prompt_tokens"] == len(ids)
    assert manager.tokenizer.decode([manager.tokenizer.eos_token_id], False)
    with ThreadPoolExecutor(2) as pool, slowed(engine):
        one = pool.submit(engine.generate, FRANCE, LONG, rid="one")
        two = pool.submit(engine.generate, FRANCE, LONG, rid="two")
        until(lambda: engine.context.status.total("num_running_reqs") == 2)
        manager.abort_request(rid="one")
        assert one.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
        assert not two.done()
        manager.abort_request(abort_all=True)
        assert two.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
    until(lambda: is_idle(engine))


async def test_the_tokenizer_manager_pauses(engine):
    manager = engine.tokenizer_manager
    for pause, ends_as in ((SimpleNamespace(mode="in_place"), "length"), ("abort", "abort")):
        with slowed(engine):
            params = {**LONG, "max_new_tokens": 300}
            task = asyncio.create_task(engine.async_generate(FRANCE, params))
            await until_in_loop(lambda: engine.context.status.total("num_running_reqs"))
            await manager.pause_generation(pause)
        try:
            late = asyncio.create_task(engine.async_generate(JAPAN, SHORT))
            await until_in_loop(lambda: engine.context.client.gate.num_held)
            if ends_as == "abort":
                await asyncio.wait([task], timeout=60)
            assert not late.done()
            assert task.done() == (ends_as == "abort")
        finally:
            await manager.continue_generation(SimpleNamespace(torch_empty_cache=True))
        assert (await task)["meta_info"]["finish_reason"]["type"] == ends_as
        assert (await late)["text"].startswith(" Tokyo")
    with pytest.raises(ValueError, match="in_place"):
        await manager.pause_generation("later")
