"""Chosen experts, by request and in records, against hooks, under every way of scheduling."""

from __future__ import annotations

import base64
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.experts import EXPERTS
from runtime.client.generation_stream import GenerationChunk
from runtime.executor.expert_recorder import ExpertRecorder
from runtime.extras.routed_experts.front import NAME, RoutedExpertsAnswer
from runtime.requests.extra_spec import ExtraBlock, ExtraSpec
from tests.support.engine import InProcessEngine
from tests.support.graphs import RecordedGraph, add_eager_graphs, record_graphs_on_the_cpu
from tests.support.tiny_models import tiny_model

MODEL = "qwen2_moe"
# Of three layers the first is dense.
NUM_LAYERS, NUM_EXPERTS, LAYERS, NUM_CHOSEN = 3, 6, [1, 2], 2
NUM_NEW = 16
PROMPTS = [np.random.default_rng(i).integers(3, 500, 9 + 5 * i).tolist() for i in range(10)]
OFFERED = {"enable_return_routed_experts": True}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked overlap": {"chunked_prefill_size": 7, "overlap": True},
    "few pages": {"max_total_tokens": 16 * 12, "max_running_requests": 8},
}


@cache
def reference_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model(MODEL), dtype=torch.float32).eval()


def reference(tokens: list[int]) -> torch.Tensor:
    """`[num_tokens, layers with experts, chosen]`, each token's in ascending order."""
    found: list[torch.Tensor] = []
    hooks = [
        reference_model()
        .model.layers[layer]
        .mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
        for layer in LAYERS
    ]
    with torch.inference_mode():
        reference_model()(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).sort(-1).values


def counts_of(chosen: torch.Tensor) -> torch.Tensor:
    """`[num_layers, num_experts]` of `[num_tokens, layers with experts, chosen]`."""
    counts = torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.int64)
    for place, layer in enumerate(LAYERS):
        counts[layer] = torch.bincount(chosen[:, place].flatten(), minlength=NUM_EXPERTS)
    return counts


def given(engine: InProcessEngine, request_id: int) -> torch.Tensor:
    """What a request was told, in the shape and the order of `reference`."""
    found = []
    for is_input in (True, False):
        for block in engine.blocks.get((request_id, NAME), []):
            if block.is_input == is_input:
                assert int.from_bytes(block.data[:4], "little") == len(LAYERS) * NUM_CHOSEN * 4
                found.append(np.frombuffer(block.data[4:], dtype="<i4"))
    numbers = torch.from_numpy(np.concatenate(found)).long()
    return numbers.view(-1, len(LAYERS), NUM_CHOSEN).sort(-1).values


def check(engine: InProcessEngine, request_id: int, prompt: list[int], start: int = 0) -> None:
    computed = [*prompt, *engine.tokens[request_id]][:-1]
    assert torch.equal(given(engine, request_id), reference(computed)[start:])


class TopK(TorchDispatchMode):
    """A hook that knows nothing of recorders: counts what the routers' top-k gives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.int64)
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default and args[0].shape[-1] == NUM_EXPERTS:
            layer = LAYERS[self.num_calls % len(LAYERS)]
            self.counts[layer] += torch.bincount(made[1].flatten(), minlength=NUM_EXPERTS)
            self.num_calls += 1
        return made


def run_all(engine: InProcessEngine, extras: list[ExtraSpec]) -> None:
    for i, prompt in enumerate(PROMPTS):
        # Some ask, and some beside them do not.
        engine.add(i + 1, prompt, NUM_NEW, extras=extras if i % 3 else (), ignore_eos=True)
    engine.run()


@pytest.mark.parametrize("way", WAYS)
def test_each_request_gets_its_own(way: str) -> None:
    engine = InProcessEngine(tiny_model(MODEL), **OFFERED, **WAYS[way])
    run_all(engine, [ExtraSpec(NAME, prompt_start=0)])
    for i, prompt in enumerate(PROMPTS):
        if i % 3:
            check(engine, i + 1, prompt)
        else:
            assert (i + 1, NAME) not in engine.blocks
    if way == "few pages":
        assert engine.shared["num_retractions_total"] > 0


def test_from_a_position_on_and_behind_a_cached_prefix() -> None:
    engine = InProcessEngine(tiny_model(MODEL), **OFFERED)
    prompt = PROMPTS[9]
    for request_id, start, cached in ((1, 0, 0), (2, 20, 16), (3, len(prompt) - 1, 48)):
        extras = [ExtraSpec(NAME, prompt_start=start)]
        engine.add(request_id, prompt, 5, extras=extras, ignore_eos=True)
        engine.run()
        assert engine.cached[request_id] == cached
        check(engine, request_id, prompt, start)


def test_from_the_buffers_of_graphs() -> None:
    engine = InProcessEngine(tiny_model(MODEL), overlap=True, **OFFERED)
    add_eager_graphs(engine.runner, max_batch=16)
    run_all(engine, [ExtraSpec(NAME, prompt_start=0)])
    for i, prompt in enumerate(PROMPTS):
        if i % 3:
            check(engine, i + 1, prompt)


@pytest.mark.parametrize("mode", ["stat", "stat_approx", "per_pass", "per_token"])
@pytest.mark.parametrize("way", WAYS)
def test_records_equal_a_hook(way: str, mode: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path))
    engine = InProcessEngine(tiny_model(MODEL), expert_recorder_mode=mode, **WAYS[way])
    recorder: ExpertRecorder = engine.runner.recorder
    recorder.start()
    with TopK() as hook:
        run_all(engine, [])
    assert torch.equal(recorded(recorder), hook.counts)
    assert hook.counts[1:].sum() > 0
    if way == "few pages":
        assert engine.shared["num_retractions_total"] > 0


@pytest.mark.parametrize("mode", ["stat", "stat_approx", "per_pass", "per_token"])
def test_records_of_graphs(mode: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is not counted, and what graphs replay is counted without the layers' code."""
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path))
    record_graphs_on_the_cpu(monkeypatch)
    # One that does not wait for the device.
    monkeypatch.setitem(EXPERTS.preferred, "cpu", ("grouped",))
    engine = InProcessEngine(
        tiny_model(MODEL), expert_recorder_mode=mode, max_running_requests=8, **OFFERED
    )
    assert engine.runner.has_graphs
    recorder: ExpertRecorder = engine.runner.recorder
    recorder.start()
    before = RecordedGraph.num_replays
    run_all(engine, [ExtraSpec(NAME, prompt_start=0)])
    assert RecordedGraph.num_replays > before
    computed = [[*p, *engine.tokens[i + 1]][:-1] for i, p in enumerate(PROMPTS)]
    assert torch.equal(recorded(recorder), sum(counts_of(reference(each)) for each in computed))
    for i, prompt in enumerate(PROMPTS):
        if i % 3:
            check(engine, i + 1, prompt)


def recorded(recorder: ExpertRecorder) -> torch.Tensor:
    """All steps' counts, as the file has them; those of the tokens' ids are the same."""
    path = recorder.dump()
    assert path is not None
    found: dict[str, Any] = torch.load(path, weights_only=True)  # noqa: TID251  # as users do
    if "logical_count" in found:
        counts: torch.Tensor = found["logical_count"].sum(dim=0)
        return counts
    records = found["records"]
    counts = torch.stack([record["global_physical_count"] for record in records]).sum(dim=0)
    if "topk_ids_of_layer" in records[0]:
        ids = torch.cat([record["topk_ids_of_layer"][LAYERS] for record in records], dim=1)
        assert torch.equal(counts_of(ids.transpose(0, 1)), counts)
        assert all((record["topk_ids_of_layer"][0] == -1).all() for record in records)
    return counts


def chunk(token: int, *found: tuple[bool, list[int]]) -> GenerationChunk:
    """One token, and what is told of prompt or output, of one layer and one chosen expert."""
    blocks = [
        ExtraBlock(1, NAME, is_input, (4).to_bytes(4, "little") + np.array(ids, "<i4").tobytes())
        for is_input, ids in found
    ]
    return GenerationChunk("", [token], None, 1, 0, extras=blocks)


@pytest.mark.parametrize(("num_left_out", "expected"), [(0, [7, 1, 2]), (1, [7, 2])])
def test_what_lies_behind_a_stop_string_is_cut_off(num_left_out: int, expected: list[int]) -> None:
    answer = RoutedExpertsAnswer(num_left_out)
    answer.add(chunk(5, (True, [7]), (False, [1])), incremental=False)
    answer.add(chunk(6, (False, [2, 3])), incremental=False)
    shown = base64.b64decode(answer.at_end()["routed_experts"])
    assert np.frombuffer(shown, dtype="<i4").tolist() == expected
