"""Models with recurrent states against `transformers`, however their prompts are computed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.ipc.messages import AbortRequests, ContinueGeneration, PauseGeneration
from runtime.ipc.weight_messages import LoadDummy, ReleaseMemory, ResumeMemory
from runtime.models.registry import read_model_spec
from tests.support.driver import load
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import TINY_HYBRIDS, copy_of, tiny_model
from tests.support.two_ranks import TwoRanks

FAMILIES = list(TINY_HYBRIDS)
NUM_NEW = 24
PAGE = 16


def tokens(seed: int, length: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 500, length).tolist()
    return found


# Longer than a few pages, shorter than a convolution, and two that part in the middle of a page.
COMMON = tokens(0, 70)
PROMPTS = [tokens(1, 90), tokens(2, 2), COMMON + tokens(3, 30), COMMON + tokens(4, 9)]


@cache
def theirs(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
    return model.eval()


def assert_greedy(name: str, prompt: list[int], answer: list[int]) -> None:
    """Each token is `transformers`' most likely one after all that came before it."""
    with torch.inference_mode():
        logits = theirs(name)(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
    assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()


@cache
def undisturbed(name: str) -> list[list[int]]:
    engine = InProcessEngine(tiny_model(name), disable_radix_cache=True)
    answers = [engine.generate(prompt, NUM_NEW, ignore_eos=True) for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_greedy(name, prompt, answer)
    return answers


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "token by token": {"chunked_prefill_size": 1},
    "chunks of 7": {"chunked_prefill_size": 7},
    "chunks of a page, overlap": {"chunked_prefill_size": PAGE, "overlap": True},
    "chunks of 37, no tree": {"chunked_prefill_size": 37, "disable_radix_cache": True},
    "retracted": {"max_total_tokens": 272, "chunked_prefill_size": 50},
    "retracted, overlap": {"max_total_tokens": 272, "overlap": True},
    "as few slots as one request needs": {"max_mamba_cache_size": 3},
    "few slots, overlap": {
        "max_mamba_cache_size": 7,
        "overlap": True,
        "chunked_prefill_size": 20,
    },
    "small pages": {"page_size": 1},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_way_of_scheduling_shows(name: str, way: str) -> None:
    engine = InProcessEngine(tiny_model(name), **WAYS[way])
    for first_id in (1, 11):
        for i, prompt in enumerate(PROMPTS):
            engine.add(first_id + i, prompt, NUM_NEW, ignore_eos=True)
        engine.run()
        for i, answer in enumerate(undisturbed(name)):
            assert engine.tokens[first_id + i] == answer
    if "retracted" in way:
        assert engine.shared["num_retractions_total"] > 0
    if way == "whole":
        # Found again: up to the last page of each prompt that is full.
        assert [engine.cached[11 + i] for i in range(4)] == [80, 0, 96, 64]
        # The second of two prompts found where it parts from the first, which waited for nothing.
        assert engine.cached[4] == 64


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_computes_its_new_tokens_only(name: str, overlap: bool) -> None:
    engine = InProcessEngine(tiny_model(name), overlap=overlap)
    history: list[int] = []
    for turn in range(4):
        prompt = history + tokens(10 + turn, 25)
        answer = engine.generate(prompt, 20, ignore_eos=True)
        assert_greedy(name, prompt, answer)
        # What the turn before computed: all but its last token, in whole pages.
        assert engine.cached[turn + 1] == max(len(history) - 1, 0) // PAGE * PAGE
        history = prompt + answer
    # A branch from the middle: found where a turn ended, and then where the branch was.
    for request_id, found in ((5, 32), (6, 48)):
        prompt = history[:60] + tokens(20 + request_id, 9)
        assert_greedy(name, prompt, engine.generate(prompt, 8, ignore_eos=True))
        assert engine.cached[request_id] == found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_that_fails_is_computed_again(name: str, overlap: bool) -> None:
    """The failure comes after the layers have written what they keep."""
    engine = InProcessEngine(
        tiny_model(name), overlap=overlap, chunked_prefill_size=40, disable_cuda_graph=True
    )
    num_failures = 0

    def fail_afterwards(forward: Any, batch: Any) -> Any:
        nonlocal num_failures
        hidden = forward(batch)
        if len(batch.seq_lens) > 1:
            num_failures += 1
            raise RuntimeError("planted")
        return hidden

    for i, prompt in enumerate(PROMPTS):
        engine.add(i + 1, prompt, NUM_NEW, ignore_eos=True)
    with engine.computing(fail_afterwards):
        engine.run()
    assert num_failures > NUM_NEW // 2
    for i, answer in enumerate(undisturbed(name)):
        assert engine.tokens[i + 1] == answer


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_pauses_aborts_and_sampling(name: str, overlap: bool) -> None:
    def run(every: int) -> dict[int, list[int]]:
        engine = InProcessEngine(tiny_model(name), overlap=overlap, chunked_prefill_size=24)
        for number, prompt in enumerate(PROMPTS * 2):
            sampling = {"temperature": 0.9, "seed": number} if number % 2 else {}
            engine.add(number, prompt, NUM_NEW, ignore_eos=True, **sampling)
        engine.add(99, PROMPTS[0], NUM_NEW, ignore_eos=True)
        for step in range(1, 1000):
            if not engine.scheduler.has_work:
                break
            if step == 12:
                engine.scheduler.receive([AbortRequests([99])])
            if step % every == 0:
                engine.scheduler.receive([PauseGeneration(step, True), ContinueGeneration(step)])
            engine.scheduler.step()
        engine.run()
        del engine.tokens[99]
        return engine.tokens

    plain = run(10**9)
    assert [plain[i] for i in (0, 2)] == [undisturbed(name)[i] for i in (0, 2)]
    for every in (3, 8):
        assert run(every) == plain


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_equal_transformers(name: str) -> None:
    assert not read_model_spec(tiny_model(name)).uneven_parts(2)
    prompt = PROMPTS[0]
    with torch.inference_mode():
        expected = theirs(name)(torch.tensor([prompt]), use_cache=False).logits[0]
    for logits in TwoRanks(tiny_model(name)).prefill(prompt, 33):
        assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", FAMILIES)
def test_all_weights_are_read_back_as_the_files_have_them(name: str) -> None:
    model = load(tiny_model(name))
    holders, files = dict(model.holders()), load_file(tiny_model(name) / "model.safetensors")
    for weight in model.spec.weights:
        holder, _, parameter = weight.target.rpartition(".")
        part = holders[holder].part(parameter, weight.shard)
        assert torch.equal(part, files[weight.name].float()), weight.name


def test_experts_in_one_tensor_are_those_of_many(tmp_path: Path) -> None:
    """Qwen3.5 is published in the first form in 16 bits, and in the second one in 8 bits."""
    folder = copy_of("qwen3_5_moe", tmp_path / "m")
    path = folder / "model.safetensors"
    files = load_file(path)
    for layer_idx in range(4):
        experts = f"model.layers.{layer_idx}.mlp.experts"
        gates, ups, downs = (
            [files.pop(f"{experts}.{i}.{part}_proj.weight") for i in range(6)]
            for part in ("gate", "up", "down")
        )
        files[f"{experts}.gate_up_proj"] = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)
        files[f"{experts}.down_proj"] = torch.stack(downs)
    save_file(files, path, metadata={"format": "pt"})
    assert "model.layers.0.mlp.experts.down_proj" in {
        each.name for each in read_model_spec(folder).weights
    }
    engine = InProcessEngine(folder)
    assert engine.generate(PROMPTS[0], NUM_NEW, ignore_eos=True) == undisturbed("qwen3_5_moe")[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_released_memory_comes_back_and_other_weights_find_no_snapshot(name: str) -> None:
    engine = InProcessEngine(tiny_model(name))
    before = engine.generate(PROMPTS[0], NUM_NEW, ignore_eos=True)
    assert engine.ask(ReleaseMemory(["kv_cache"])).success
    assert engine.ask(ResumeMemory(["kv_cache"])).success
    assert engine.generate(PROMPTS[0], NUM_NEW, ignore_eos=True) == before
    assert engine.cached[2] == 0
    assert engine.generate(PROMPTS[0], NUM_NEW, ignore_eos=True) == before
    assert engine.cached[3] == 80
    assert engine.ask(LoadDummy(1), flush_cache=True).success
    others = engine.generate(PROMPTS[0], NUM_NEW, ignore_eos=True)
    assert engine.cached[4] == 0
    assert others != before
    assert engine.generate(PROMPTS[0], NUM_NEW, ignore_eos=True) == others
    assert engine.cached[5] == 80
