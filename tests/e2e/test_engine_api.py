"""The offline engine on the bundled demo model: shapes, loops, streams, errors, ends."""

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import headrace as sgl
from headrace.utils import async_stream_and_merge, stream_and_merge
from tests.support.offline import (
    FRANCE,
    JAPAN,
    LONG,
    MODEL,
    PLAIN,
    SHORT,
    is_idle,
    run_script,
    slowed,
)
from tests.support.server import ServerProcess
from tests.support.waiting import until, until_in_loop


@pytest.fixture(scope="module")
def engine() -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path=MODEL) as engine:
        yield engine


@pytest.fixture(scope="module")
def cumulative() -> Iterator[sgl.Engine]:
    # Beside the other engine, in the same process.
    with sgl.Engine(
        **PLAIN,
        incremental_streaming_output=False,
        max_running_requests=2,
        max_queued_requests=3,
    ) as engine:
        yield engine


# ---- shapes -------------------------------------------------------------------------------------


def test_a_text_gives_a_dict_and_a_list_a_list(engine):
    single = engine.generate(FRANCE, SHORT)
    assert single["text"].startswith(" Paris")
    assert len(single["output_ids"]) == single["meta_info"]["completion_tokens"] == 8
    assert single["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert single["meta_info"]["prompt_tokens"] == 5
    batch = engine.generate([FRANCE, JAPAN], SHORT)
    assert [each["text"].split()[0] for each in batch] == ["Paris.", "Tokyo."]
    assert [each["text"] for each in engine.generate([FRANCE], SHORT)] == [single["text"]]
    assert engine.generate([], SHORT) == []
    assert list(engine.generate([], SHORT, stream=True)) == []


def test_ids_have_the_same_shapes_and_answers(engine):
    ids = engine.context.tokenizer.encode(FRANCE)
    text = engine.generate(FRANCE, SHORT)["text"]
    assert engine.generate(input_ids=ids, sampling_params=SHORT)["text"] == text
    assert engine.generate(input_ids=[ids], sampling_params=SHORT)[0]["text"] == text
    assert engine.generate(None, SHORT, [ids, ids])[1]["text"] == text


def test_arrays_are_ids_too(engine):
    numpy = pytest.importorskip("numpy")
    ids = numpy.array(engine.context.tokenizer.encode(FRANCE))
    assert engine.generate(input_ids=ids, sampling_params=SHORT)["text"].startswith(" Paris")


def test_samples_come_prompt_by_prompt(engine):
    answers = engine.generate([FRANCE, JAPAN], {**SHORT, "n": 3})
    assert [each["text"].split()[0] for each in answers] == ["Paris."] * 3 + ["Tokyo."] * 3
    assert len(engine.generate(FRANCE, {**SHORT, "n": 2})) == 2


def test_parameters_and_names_per_prompt(engine):
    params = [{**SHORT, "max_new_tokens": 1}, {**SHORT, "max_new_tokens": 2}]
    answers = engine.generate([FRANCE, JAPAN], params, rid=["first", "second"])
    assert [each["meta_info"]["completion_tokens"] for each in answers] == [1, 2]
    assert [each["meta_info"]["id"] for each in answers] == ["first", "second"]
    assert engine.generate(FRANCE)["meta_info"]["completion_tokens"] <= 128


def test_a_batch_larger_than_the_queue_runs(cumulative):
    prompts = [f"{number % 20} + 1 =" for number in range(60)]
    answers = cumulative.generate(prompts, {**SHORT, "max_new_tokens": 4})
    assert [each["text"].split()[0].strip(".") for each in answers] == [
        str(number % 20 + 1) for number in range(60)
    ]


def test_a_batch_may_be_larger_than_a_request_over_http(engine):
    params = {"temperature": 0, "max_new_tokens": 1}
    assert len(engine.generate(["The"] * 4200, params)) == 4200


def test_a_progress_bar_when_asked(engine, capfd):
    engine.generate([FRANCE] * 3, SHORT, progress_bar=True)
    assert "3/3" in capfd.readouterr().err
    engine.generate([FRANCE] * 100, {**SHORT, "max_new_tokens": 1})
    assert not capfd.readouterr().err, "a bar belongs on a terminal"
    with pytest.raises(ValueError, match="longer than"):
        engine.generate(["x", "wheel " * 3000], SHORT, progress_bar=True)


# ---- threads and loops --------------------------------------------------------------------------


def test_any_loop_any_thread(engine):
    expected = engine.generate(FRANCE, SHORT)["text"]

    async def ask() -> str:
        return (await engine.async_generate(FRANCE, SHORT))["text"]

    async def ask_blocking() -> str:
        return engine.generate(FRANCE, SHORT)["text"]

    assert asyncio.run(ask()) == expected
    assert asyncio.run(ask()) == expected
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(ask()) == expected
    loop.close()
    assert engine.generate(FRANCE, SHORT)["text"] == expected
    assert asyncio.run(ask_blocking()) == expected
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda _: engine.generate(FRANCE, SHORT)["text"], range(16))
        assert set(answers) == {expected}


async def test_many_tasks_at_once(engine):
    prompts = [f"{number % 20} + 1 =" for number in range(400)]
    params = {**SHORT, "max_new_tokens": 3}
    tasks = [asyncio.create_task(engine.async_generate(prompt, params)) for prompt in prompts]
    answers = [answer["text"].split()[0].strip(".") for answer in await asyncio.gather(*tasks)]
    assert answers == [str(number % 20 + 1) for number in range(400)]


def test_with_nest_asyncio_applied_before_and_after():
    pytest.importorskip("nest_asyncio")
    done = run_script(
        """
        import asyncio, os
        import headrace as sgl
        import nest_asyncio
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        params = {"temperature": 0, "max_new_tokens": 4}

        async def kernel():
            # A cell runs inside a loop: made before, applied, made after.
            options = {"model_path": os.environ["MODEL"], "grammar_backend": "none"}
            before = sgl.Engine(**options)
            nest_asyncio.apply()
            after = sgl.Engine(**options)
            for engine in (before, after):
                async def main():
                    return await engine.async_generate("The capital of France is", params)
                print(asyncio.run(main())["text"])
                print(engine.generate("The capital of France is", params)["text"])
                print(engine.flush_cache().success)
                engine.shutdown()

        loop.run_until_complete(kernel())
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Paris") == 4
    assert done.stdout.count("True") == 2
    assert not done.stderr


# ---- streams ------------------------------------------------------------------------------------


def test_chunks_are_deltas_by_default(engine):
    whole = engine.generate(FRANCE, SHORT)
    chunks = list(engine.generate(FRANCE, SHORT, stream=True))
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [i for chunk in chunks for i in chunk["output_ids"]] == whole["output_ids"]
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 1
    )
    assert chunks[-1]["meta_info"]["completion_tokens"] == 8
    assert all(chunk["text"] == chunk["text_delta"] for chunk in chunks)
    assert "index" not in chunks[0]


def test_chunks_are_cumulative_when_asked(cumulative):
    whole = cumulative.generate(FRANCE, SHORT)
    chunks = list(cumulative.generate(FRANCE, SHORT, stream=True))
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    for before, after in itertools.pairwise(chunks):
        assert after["text"] == before["text"] + after["text_delta"]
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert len(after["output_ids"]) > len(before["output_ids"])


def test_a_streamed_batch_says_whose_chunk_it_is(engine):
    texts = ["", "", "", ""]
    for chunk in engine.generate([FRANCE, JAPAN], {**SHORT, "n": 2}, stream=True):
        texts[chunk["index"]] += chunk["text"]
    assert [text.split()[0] for text in texts] == ["Paris.", "Paris.", "Tokyo.", "Tokyo."]


class Stripped:
    """An engine of somebody else: no `text_delta` in its chunks."""

    def __init__(self, engine: sgl.Engine) -> None:
        self.engine = engine

    def generate(self, *args, **kwargs):
        for chunk in self.engine.generate(*args, **kwargs):
            del chunk["text_delta"]
            yield chunk


@pytest.mark.parametrize("word", ["ha", "0", "The capital of Peru is Lima."])
def test_merged_text_is_exact_in_both_modes(engine, cumulative, word):
    ids = engine.context.tokenizer.encode(word)
    # The same token again and again is what guessing at overlaps gets wrong.
    bias = {ids[0]: 10000.0} if len(ids) == 1 else {}
    for params in ({**SHORT, "ignore_eos": True, "logit_bias": bias}, {**SHORT, "top_k": 1}):
        whole = engine.generate(word, params)["text"]

        async def pieces(llm: sgl.Engine, params=params) -> list[str]:
            return [piece async for piece in async_stream_and_merge(llm, word, params)]

        for llm in (engine, cumulative):
            assert stream_and_merge(llm, word, params) == whole
            parts = asyncio.run(pieces(llm))
            assert "".join(parts) == whole
            assert all(parts)
        assert stream_and_merge(Stripped(cumulative), word, params) == whole


def test_a_repeated_token_was_really_tried(engine):
    ids = engine.context.tokenizer.encode("0")
    params = {**SHORT, "logit_bias": {ids[-1]: 10000.0}, "ignore_eos": True}
    assert engine.generate("0", params)["text"] == "00000000"


def test_stop_strings_never_show(engine):
    params = {**SHORT, "max_new_tokens": 40, "stop": "France is"}
    whole = engine.generate(FRANCE, params)
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": "France is"}
    streamed = [chunk["text"] for chunk in engine.generate(FRANCE, params, stream=True)]
    assert "".join(streamed) == whole["text"] == " Paris. "


# ---- agreement with the server ------------------------------------------------------------------


def test_the_server_says_the_same(engine):
    with ServerProcess("--model-path", MODEL, "--skip-server-warmup") as server:
        server.wait_ready()
        body = {"text": [FRANCE, JAPAN, "Hello, my name is"], "sampling_params": SHORT}
        remote = server.client.post("/generate", json=body).json()
        info = server.client.get("/server_info").json()
    local = engine.generate(body["text"], SHORT)
    assert [each["text"] for each in local] == [each["text"] for each in remote]
    assert local[0].keys() == remote[0].keys()
    assert local[0]["meta_info"].keys() == remote[0]["meta_info"].keys()
    assert engine.get_server_info().keys() == info.keys()


def test_logprobs_whole_and_streamed(engine):
    asked = {"return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    whole = engine.generate(FRANCE, SHORT, **asked)
    meta = whole["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert [each[1] for each in meta["output_token_logprobs"]] == whole["output_ids"]
    assert "".join(each[2] for each in meta["output_token_logprobs"]).startswith(whole["text"])
    streamed = []
    for chunk in engine.generate(FRANCE, SHORT, stream=True, **asked):
        streamed += chunk["meta_info"]["output_token_logprobs"]
    assert [each[1] for each in streamed] == whole["output_ids"]


# ---- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"prompt": "x", "sampling_params": {"temprature": 1}}, "'temprature'.*'temperature'"),
        ({"prompt": "x", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"prompt": "x", "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"prompt": ["x", "y"], "sampling_params": [{}]}, "sampling_params.*2 prompts"),
        ({"prompt": ["x", "y"], "rid": ["a"]}, "rid.*2 prompts"),
        ({}, "prompt, input_ids and input_embeds"),
        ({"prompt": "x", "input_ids": [1]}, "prompt, input_ids and input_embeds"),
        ({"prompt": 3}, "prompt"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"prompt": "wheel " * 3000}, "longer than"),
        ({"prompt": ["x", "wheel " * 3000]}, "longer than"),
        ({"prompt": "x", "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len"),
        ({"prompt": "x", "return_logprob": True, "token_ids_logprob": [10**6]}, "token_ids"),
        ({"prompt": "x", "lora_path": "adapter"}, "lora_path"),
        ({"prompt": "x", "image_data": "cat.png"}, "image_data"),
        ({"prompt": "x", "session_params": {"id": "s"}}, "no open session"),
        ({"prompt": "x", "return_hidden_states": True}, "return_hidden_states"),
        ({"prompt": "x", "sampling_params": {"regex": "a+", "ebnf": "x"}}, "regex"),
    ],
)
def test_a_mistake_is_a_value_error_and_costs_nothing_else(engine, call, words):
    with pytest.raises(ValueError, match=words):
        engine.generate(**call)
    with pytest.raises(ValueError, match=words):
        engine.generate(**call, stream=True)
    with pytest.raises(ValueError, match=words):
        asyncio.run(engine.async_generate(**call))
    assert not engine.context.client.num_in_flight
    assert engine.generate(FRANCE, SHORT)["text"].startswith(" Paris")


def test_unknown_options_are_type_errors(engine):
    with pytest.raises(TypeError, match=r"'priorty'.*'priority'"):
        engine.generate("x", priorty=1)
    neutral = {"return_logprob": False, "top_logprobs_num": 0, "lora_path": None}
    assert engine.generate(FRANCE, SHORT, **neutral)["text"]


def test_what_is_missing_says_so(engine):
    for name in ("collective_rpc", "save_sharded_model"):
        assert not hasattr(engine, name)
        with pytest.raises(NotImplementedError, match=f"Engine.{name}: .* not supported yet"):
            getattr(engine, name)
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        engine.generat  # noqa: B018


# ---- leaving, aborting --------------------------------------------------------------------------


def test_leaving_a_stream_ends_the_request(engine):
    for chunk in engine.generate(FRANCE, LONG, stream=True):
        assert chunk["text"]
        break
    del chunk
    until(lambda: is_idle(engine))
    with slowed(engine):
        never_read = engine.generate(FRANCE, LONG, stream=True)
        assert not is_idle(engine)
        never_read.close()
    until(lambda: is_idle(engine))
    assert list(never_read) == []
    dropped = engine.generate([FRANCE, JAPAN], LONG, stream=True)
    next(dropped)
    del dropped
    until(lambda: is_idle(engine))


async def test_cancelling_ends_the_request(engine):
    for call in (engine.async_generate(FRANCE, LONG), read_all(engine)):
        with slowed(engine):
            task = asyncio.create_task(call)
            await until_in_loop(lambda: engine.context.status.total("num_running_reqs"))
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            until(lambda: is_idle(engine))
    async for _ in await engine.async_generate([FRANCE, JAPAN], LONG, stream=True):
        break
    until(lambda: is_idle(engine))
    async for _ in async_stream_and_merge(engine, FRANCE, LONG):
        break
    assert (await engine.async_generate(FRANCE, SHORT))["text"].startswith(" Paris")


async def read_all(engine: sgl.Engine) -> None:
    async for _ in await engine.async_generate(FRANCE, LONG, stream=True):
        pass


@pytest.fixture
def ctrl_c_interrupts():
    # A shell that starts the tests in the background has them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("stream", [False, True])
def test_ctrl_c_ends_the_request(engine, stream, ctrl_c_interrupts):
    def interrupt() -> None:
        until(lambda: engine.context.status.total("num_running_reqs") == 3)
        os.kill(os.getpid(), signal.SIGINT)

    with slowed(engine):
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            for _ in engine.generate([FRANCE] * 3, LONG, stream=stream):
                pass
    until(lambda: is_idle(engine))
    assert engine.generate(FRANCE, SHORT)["text"].startswith(" Paris")


def test_abort_keeps_the_text_so_far(engine):
    with ThreadPoolExecutor(2) as pool, slowed(engine):
        one = pool.submit(engine.generate, FRANCE, LONG, rid="one")
        two = pool.submit(engine.generate, [JAPAN, FRANCE], LONG, rid="two")
        until(lambda: engine.context.status.total("num_running_reqs") == 3)
        engine.abort("one")
        assert one.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
        assert one.result()["text"].startswith(" Paris")
        engine.abort(abort_all=True)
        assert {each["meta_info"]["finish_reason"]["type"] for each in two.result(60)} == {"abort"}


def test_flush_cache_and_information(engine):
    engine.generate(FRANCE + " " + "the mill " * 40, SHORT)
    until(lambda: is_idle(engine))
    assert engine.flush_cache().success
    assert engine.get_model_info()["model_path"] == MODEL
    info = engine.get_server_info()
    assert info["max_total_num_tokens"] > 0
    assert info["internal_states"]
    assert engine.server_args.model_path == MODEL
    assert engine.server_args.log_level == "error"
