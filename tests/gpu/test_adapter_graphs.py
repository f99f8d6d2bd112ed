"""Adapters (LoRA) in CUDA graphs: the tokens of the merged weights; other steps run as before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.lora import LORA, TokenSlots, make_bank
from runtime.checkpoint.peft_adapter import target_modules
from runtime.config.lora_options import LoraLimits
from runtime.executor.graph_buckets import Bucket
from runtime.ipc.weight_messages import LoadAdapter, UnloadAdapter
from runtime.models.registry import read_model_spec
from runtime.step.step_plan import Int64Array, StepPlan
from tests.kernels.test_lora import SHAPES, expected, operands
from tests.support.adapters import make_adapter, merged_model
from tests.support.engine import InProcessEngine
from tests.support.gpu import graph_runner, on_gpu, prompt, small_engine
from tests.support.tiny_models import tiny_model

RANKS = (4, 8, 64)
LENGTHS = (70, 5, 33, 140)
NUM_NEW = 12
# As in `SHAPES`: many tokens, and ranks for which blocks of few tokens have to be narrower.
LARGER = [
    (700, 896, (896, 128, 128), 8, 16),
    (40, 4096, (896, 128), 4, 64),
    (3, 4096, (300,), 3, 256),
    (1, 4096, (300,), 2, 256),
]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGER], ids=str)
def test_the_kernels(shape, dtype):
    memory, ranks, in_features, parts, slots, x, out = operands(shape, dtype)
    want = expected(memory, ranks, in_features, parts, slots, x, out)
    for name in LORA:
        if name == "cpu":
            continue
        bank = make_bank(memory.cuda(), ranks.cuda(), in_features, parts, name)
        found = out.cuda()
        bank.add(found, x.cuda(), TokenSlots(slots.cuda(), len(ranks)))
        tolerance = 1e-4 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(found.cpu().double(), want, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(root / str(rank), tiny_model("llama"), rank, rank) for rank in RANKS]


@pytest.fixture(scope="module")
def merged(adapters: list[Path]) -> list[list[int]]:
    found = []
    for index, folder in enumerate([None, *adapters]):
        model, ids = merged_model(tiny_model("llama"), folder), prompt(LENGTHS[index], index)
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1
        )
        found.append(out[0, len(ids) :].tolist())
    return found


def engine_with(adapters: list[Path], slots: int) -> InProcessEngine:
    targets = target_modules(read_model_spec(tiny_model("llama")), [])
    limits = LoraLimits(max_per_batch=slots, max_rank=max(RANKS), target_modules=targets)
    engine = small_engine(tiny_model("llama"), lora=limits)
    for index, folder in enumerate(adapters):
        assert engine.ask(LoadAdapter(index + 1, str(folder))).success
    return engine


def run_each(engine: InProcessEngine, first: int) -> list[list[int]]:
    for index, length in enumerate(LENGTHS):
        engine.add(first + index, prompt(length, index), NUM_NEW, adapter_id=index, ignore_eos=True)
        engine.scheduler.step()
    engine.run()
    return [engine.tokens[first + index] for index in range(len(LENGTHS))]


@pytest.mark.also_cpu
@pytest.mark.parametrize("slots", [3, 1])
def test_graphs_give_the_tokens_of_the_merged_weights(adapters, merged, slots, graphs):
    engine = engine_with(adapters, slots)
    runner, kinds = graph_runner(engine), []
    run = runner.run

    def run_noted(bucket: Bucket, plan: StepPlan, *, wants_logits: bool) -> Int64Array:
        kinds.append(bucket)
        return run(bucket, plan, wants_logits=wants_logits)

    runner.run = run_noted
    assert run_each(engine, 1) == merged
    assert any(bucket.adapted and bucket.decodes for bucket in kinds)
    assert any(bucket.adapted and not bucket.decodes for bucket in kinds)
    # Another adapter comes to a slot that graphs hold.
    assert engine.ask(UnloadAdapter(1)).success
    assert engine.ask(LoadAdapter(9, str(adapters[2]))).success
    engine.add(50, prompt(LENGTHS[3], 3), NUM_NEW, adapter_id=9, ignore_eos=True)
    engine.run()
    assert engine.tokens[50] == merged[3]
    # Without any adapter it is a graph without them.
    kinds.clear()
    engine.add(60, prompt(LENGTHS[0], 0), NUM_NEW, ignore_eos=True)
    engine.run()
    assert engine.tokens[60] == merged[0]
    assert kinds
    assert not any(bucket.adapted for bucket in kinds)
