"""Conversations that do not fit into the pool come back from host memory, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.config.page_files_config import PageFilesConfig
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.ipc.weight_messages import (
    LoadAdapter,
    LoadDummy,
    LoadFolder,
    ReleaseMemory,
    ResumeMemory,
)
from tests.numerics.test_adapters import limits
from tests.numerics.test_engine import PROMPTS
from tests.support.adapters import make_adapter
from tests.support.engine import DEVICE, InProcessEngine
from tests.support.tiny_families import tiny_family
from tests.support.tiny_models import changed_weights, tiny_model
from tests.support.waiting import until

MODELS = dict.fromkeys(("qwen3", "gemma3", "mistral_window"), tiny_model) | {
    "deepseek_v3": tiny_family
}
# Room for two conversations of up to 172 tokens.
TIER = {"page_size": 4, "max_total_tokens": 320, "host_pool_ratio": 8.0}
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 13": {"chunked_prefill_size": 13},
    "overlap": {"chunked_prefill_size": 30, "overlap": True},
    "8 bits": {"kv_cache_dtype": "int8"},
    "pages of 1": {"page_size": 1},
    "host memory is short": {"host_pool_ratio": 0.4},
    "retracted, longest prefix first": {"max_total_tokens": 240, "schedule_policy": "lpm"},
}


def conversations(engine: InProcessEngine, *, at_a_time: int, **sampling: Any) -> list[list[int]]:
    """Run six conversations of three turns; return their tokens."""
    histories = [list(PROMPTS[i]) for i in range(8, 14)]
    number = max(engine.tokens, default=0)
    for turn in range(3):
        for first in range(0, 6, at_a_time):
            ids = {}
            for i in range(first, min(first + at_a_time, 6)):
                number += 1
                ids[i] = number
                engine.add(number, histories[i], 24, ignore_eos=True, **sampling)
            engine.run()
            for i, request_id in ids.items():
                histories[i] = [*histories[i], *engine.tokens[request_id], 5 + turn, 6, 7]
    return histories


def num_loaded(engine: InProcessEngine) -> float:
    return engine.shared["load_back_tokens_total"]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("qwen3", way) for way in WAYS),
        ("gemma3", "chunks of 13"),
        ("mistral_window", "overlap"),
        ("deepseek_v3", "pages of 1"),
    ],
)
def test_conversations_equal_those_without_a_cache(name: str, way: str) -> None:
    if way == "8 bits" and DEVICE != "cpu":
        pytest.skip("keys and values in int8 are a CPU's")
    folder, options = MODELS[name](name), WAYS[way]
    plain = {"kv_cache_dtype": options.get("kv_cache_dtype", "auto")}
    alone = InProcessEngine(folder, disable_radix_cache=True, **plain)
    expected = conversations(alone, at_a_time=6)
    engine = InProcessEngine(folder, **{**TIER, **options})
    for at_a_time in (1, 6):
        assert conversations(engine, at_a_time=at_a_time) == expected
    assert num_loaded(engine) > (50 if way == "host memory is short" else 1000)
    if way.startswith("retracted"):
        assert engine.shared["num_retractions_total"] > 0


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("qwen3_next", {"chunked_prefill_size": 30, "overlap": True}),
        ("lfm2", {"page_size": 1, "chunked_prefill_size": 50}),
        ("nemotron_h", {"max_mamba_cache_size": 7}),
        ("granite_hybrid", {"deterministic": True}),
    ],
)
def test_hybrids_resume_from_states_in_host_memory(name: str, way: dict[str, Any]) -> None:
    plain = {"deterministic": way.get("deterministic", False)}
    alone = InProcessEngine(tiny_model(name), disable_radix_cache=True, **plain)
    expected = conversations(alone, at_a_time=6)
    engine = InProcessEngine(tiny_model(name), **{**TIER, "max_mamba_cache_size": 12, **way})
    for at_a_time in (1, 6):
        assert conversations(engine, at_a_time=at_a_time) == expected
    # From the second turn on, a conversation computes its new tokens only.
    page = engine.config.page_size
    lengths = [len(PROMPTS[index]) for index in range(8, 14)]
    assert [engine.cached[i] for i in range(7, 13)] == [
        (length + 23) // page * page for length in lengths
    ]
    assert num_loaded(engine) > 1000


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_what_comes_back_has_the_bits_of_what_left(name: str) -> None:
    deterministic = name != "deepseek_v3"
    options = {"deterministic": deterministic, "chunked_prefill_size": 9}
    engine = InProcessEngine(MODELS[name](name), **TIER, **options)
    alone = InProcessEngine(MODELS[name](name), disable_radix_cache=True, **options)
    prompts = [PROMPTS[i] for i in (15, 14, 13, 15, 14)]
    for number, prompt in enumerate(prompts):
        for each in (engine, alone):
            each.add(number, prompt, 20, ignore_eos=True, logprobs=LogprobSpec(top_num=2))
            each.run()
        assert engine.tokens[number] == alone.tokens[number]
        if deterministic:
            assert engine.outputs[number] == alone.outputs[number]
    assert engine.cached[3] == (len(PROMPTS[15]) - 1) // 4 * 4
    assert num_loaded(engine) > 30


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_what_another_server_reads_from_files_has_the_bits_that_were_written(
    tmp_path: Path, kv_cache_dtype: str
) -> None:
    files = PageFilesConfig(path=str(tmp_path / "pages"))
    options: dict[str, Any] = {**TIER, "page_files": files, "deterministic": True}
    options["kv_cache_dtype"] = kv_cache_dtype

    def run() -> InProcessEngine:
        engine = InProcessEngine(tiny_model("qwen3"), **options)
        for number, index in enumerate((15, 14, 13, 12)):
            logprobs = LogprobSpec(top_num=2)
            engine.add(number, PROMPTS[index], 20, ignore_eos=True, logprobs=logprobs)
            engine.run()
        return engine

    before = run()

    # Not the last prompt's pages, which were not evicted.
    num_evicted = before.shared["evicted_tokens_total"]

    def is_written() -> bool:
        before.scheduler.rest()
        return before.shared["backuped_tokens_total"] >= num_evicted

    until(is_written)
    after = run()
    assert after.outputs == before.outputs
    assert after.tokens == before.tokens
    assert before.shared["prefetched_tokens_total"] == 0
    assert after.shared["prefetched_tokens_total"] > 100
    assert after.cached[0] == (len(PROMPTS[15]) - 1) // 4 * 4
    # Other data types are another model's.
    options["dtype"] = "bfloat16"
    assert run().shared["prefetched_tokens_total"] == 0
    options["dtype"] = "float32"
    # A trainer's weights have no files, even if the operator keeps the cache in memory.
    assert after.ask(LoadDummy(1)).success
    loaded = after.shared["prefetched_tokens_total"]
    after.ask(LoadDummy(1), flush_cache=True)
    after.generate(PROMPTS[15], 4, ignore_eos=True)
    assert after.shared["prefetched_tokens_total"] == loaded


def test_new_weights_find_nothing_of_the_old_ones(tmp_path: Path) -> None:
    folder = tiny_model("qwen3")
    other = changed_weights(folder, tmp_path / "other")
    engine = InProcessEngine(folder, **TIER)
    before = conversations(engine, at_a_time=3)
    assert engine.ask(LoadFolder(str(other)), flush_cache=True).success
    first = max(engine.tokens) + 1
    found = conversations(engine, at_a_time=3)
    assert engine.cached[first] == 0
    expected = conversations(InProcessEngine(other, disable_radix_cache=True), at_a_time=6)
    assert found == expected != before
    # Pages are allocated anew, at other addresses.
    assert engine.ask(ReleaseMemory(["kv_cache"])).success
    assert engine.ask(ResumeMemory(["kv_cache"])).success
    loaded = num_loaded(engine)
    assert conversations(engine, at_a_time=2) == expected
    assert num_loaded(engine) > loaded


def test_adapters_do_not_share_pages(tmp_path: Path) -> None:
    folder = tiny_model("llama")
    engine = InProcessEngine(folder, lora=limits(folder), **TIER)
    alone = InProcessEngine(folder, lora=limits(folder), disable_radix_cache=True)
    for adapter_id in (1, 2):
        adapter = str(make_adapter(tmp_path / str(adapter_id), folder, 8, adapter_id))
        for each in (engine, alone):
            assert each.ask(LoadAdapter(adapter_id, adapter)).success
    expected = [conversations(alone, at_a_time=6, adapter_id=i) for i in range(3)]
    for _ in range(2):
        for adapter_id in range(3):
            found = conversations(engine, at_a_time=2, adapter_id=adapter_id)
            assert found == expected[adapter_id]
    assert num_loaded(engine) > 1000


def test_a_failed_step_copies_nothing_twice() -> None:
    """Its retry has overwritten what it saved."""
    engine = InProcessEngine(tiny_model("qwen3"), **TIER)
    expected = conversations(engine, at_a_time=6)
    calls = 0

    def fail_at_times(forward: Any, batch: Any) -> Any:
        nonlocal calls
        hidden, calls = forward(batch), calls + 1
        if len(batch.seq_lens) > 1 and calls % 3 == 0:
            raise RuntimeError("planted")
        return hidden

    with engine.computing(fail_at_times):
        assert conversations(engine, at_a_time=3) == expected
    assert num_loaded(engine) > 1000


@pytest.mark.slow
def test_two_rank_processes() -> None:
    expected = conversations(
        InProcessEngine(tiny_model("qwen3"), disable_radix_cache=True), at_a_time=6
    )
    engine = InProcessEngine(tiny_model("qwen3"), tp_size=2, overlap=True, **TIER)
    assert conversations(engine, at_a_time=2) == expected
    assert num_loaded(engine) > 1000
