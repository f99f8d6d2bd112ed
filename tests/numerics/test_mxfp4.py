"""Experts in MXFP4 against `transformers`, which gets the numbers that the blocks stand for."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime.errors import StartupError
from runtime.ipc.weight_messages import ReadWeight, WeightPart
from runtime.models.layers.experts import Experts
from runtime.models.registry import read_model_spec
from runtime.weights.live_weights import LiveWeights
from runtime.weights.load_model import load_model
from runtime.weights.rank_weights import RankWeights
from runtime.weights.weight_updates import join_parts
from tests.numerics.test_fp8 import context
from tests.support.driver import Driver, load
from tests.support.mxfp4_models import stored, write_mxfp4
from tests.support.stored_numerics import divergence, prompt, reference
from tests.support.tiny_families import tiny_family
from tests.support.two_ranks import TwoRanks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# A CPU rounds activations to 8 bits; kernels of 16 bits round what lies between products.
MOST = 0.01
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("mxfp4") / "m"
    return folder, write_mxfp4(tiny_family("gpt_oss"), folder)


def test_a_cpu_multiplies_by_blocks(made: tuple[Path, dict[str, Tensor]]) -> None:
    folder, values = made
    tokens = prompt()
    want = reference(tiny_family("gpt_oss"), values, tokens)
    driver = Driver(load(folder))
    found = driver.prefill(driver.start(tokens))
    assert divergence(want, found) < MOST
    for chunk in (1, 7):
        assert torch.equal(driver.prefill(driver.start(tokens), chunk), found)
    # Halves of an expert's columns end inside of blocks: these are widened.
    for logits in TwoRanks(folder).prefill(tokens):
        assert divergence(want, logits) < MOST


@pytest.mark.skipif(not INTERPRETED, reason="run by test_triton_interpreted")
@pytest.mark.parametrize("impl", ["triton"])
def test_a_gpu_multiplies_by_blocks(made: tuple[Path, dict[str, Tensor]], impl: str) -> None:
    from kernels.experts.triton_coded import CodedExperts

    folder, values = made
    tokens = prompt()[:8]
    spec = read_model_spec(folder)
    settings = replace(context(), dtype=torch.bfloat16, experts=impl)
    model = load_model(folder, spec, settings, lambda share: None)
    experts = [each for _, each in model.holders() if isinstance(each, Experts)]
    assert all(isinstance(each.packed, CodedExperts) for each in experts)
    driver = Driver(model)
    found = driver.prefill(driver.start(tokens))
    assert divergence(reference(tiny_family("gpt_oss"), values, tokens), found.float()) < MOST


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("splits_experts", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_have_their_part_of_the_same_numbers(
    made: tuple[Path, dict[str, Tensor]], ranks: int, splits_experts: bool, dtype: torch.dtype
) -> None:
    """In blocks, and widened; what was stored comes back bit for bit."""
    folder, values = made
    on_disk = load_file(folder / "model.safetensors")
    spec = read_model_spec(folder)
    for rank in range(ranks):
        settings = replace(context(rank, ranks), splits_experts=splits_experts, dtype=dtype)
        holders = dict(load_model(folder, spec, settings, lambda share: None).holders())
        for weight in spec.weights_in_floats.values():
            holder, _, parameter = weight.target.rpartition(".")
            owner = holders[holder]
            assert isinstance(owner, Experts)
            numbers = owner.values(parameter, weight.shard)
            whole = values[weight.name]
            count, inner = spec.num_experts // ranks, spec.raw["intermediate_size"] // ranks
            if splits_experts:
                mine = whole[rank * count : (rank + 1) * count]
            elif parameter == "down":
                mine = whole[:, rank * inner : (rank + 1) * inner]
            else:
                mine = whole[:, :, 2 * rank * inner : 2 * (rank + 1) * inner]
            assert torch.equal(numbers.float(), mine), weight.name
        for weight in spec.weights if ranks == 1 else ():
            holder, _, parameter = weight.target.rpartition(".")
            part = holders[holder].part(parameter, weight.shard)
            assert torch.equal(part, on_disk[weight.name].to(part.dtype)), weight.name


@pytest.mark.parametrize("splits_experts", [True, False])
def test_weights_of_two_ranks_are_joined(
    made: tuple[Path, dict[str, Tensor]], splits_experts: bool, tmp_path: Path
) -> None:
    folder, values = made
    spec = read_model_spec(folder)
    ranks = []
    for rank in range(2):
        settings = replace(context(rank, 2), splits_experts=splits_experts)
        model = load_model(folder, spec, settings, lambda share: None)
        live = LiveWeights(model, None, lambda: None, tmp_path / "spill")
        memory: Any = SimpleNamespace(forget_recordings=lambda: None)
        ranks.append(RankWeights(rank, settings.device, live, memory, lambda: None))
    for name in (GATE_UP, GATE_UP.replace("gate_up", "down")):
        for num_rows in (2, 100):
            replies = [each.run(ReadWeight(name, num_rows)) for each in ranks]
            assert all(reply.success for reply in replies), replies
            part = msgspec.msgpack.decode(join_parts(replies), type=WeightPart)
            whole = torch.frombuffer(bytearray(part.data), dtype=torch.float32).view(part.shape)
            assert torch.equal(whole, values[name][:num_rows]), name


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_live_updates_take_blocks_or_floats(
    made: tuple[Path, dict[str, Tensor]], dtype: str, tmp_path: Path
) -> None:
    folder, values = made
    weights = LiveWeights(load(folder, dtype), None, lambda: None, tmp_path / "spill")
    before = weights.digests()
    sent = {GATE_UP: (2 * values[GATE_UP]).bfloat16()}
    weights.load_tensors({key: list(each.shape) for key, each in sent.items()}, sent.items())
    assert weights.digests() != before
    # Twice a number has the same code.
    assert torch.equal(weights.read(GATE_UP, 100)[0], 2 * values[GATE_UP][:100])
    weights.undo()
    assert weights.digests() == before

    blocks, scales, numbers = stored(values[GATE_UP] * 3)
    sent = {f"{GATE_UP}_blocks": blocks, f"{GATE_UP}_scales": scales}
    weights.load_tensors({key: list(each.shape) for key, each in sent.items()}, sent.items())
    assert torch.equal(weights.read(GATE_UP, 100)[0], numbers[:100])
    weights.keep()
    weights.load_folder(folder)
    weights.keep()
    assert weights.digests() == before
    weights.release()
    weights.restore()
    assert weights.digests() == before


def test_experts_in_16_bits_stay_so(tmp_path: Path) -> None:
    values = write_mxfp4(tiny_family("gpt_oss"), tmp_path / "m", kept="layers.1")
    driver = Driver(load(tmp_path / "m"))
    found = driver.prefill(driver.start(prompt()))
    assert divergence(reference(tiny_family("gpt_oss"), values, prompt()), found) < MOST


def test_a_row_that_is_no_whole_number_of_blocks(tmp_path: Path) -> None:
    write_mxfp4(tiny_family("gpt_oss"), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 80}))
    with pytest.raises(StartupError, match="80 columns in blocks of 32"):
        _ = read_model_spec(tmp_path / "m").weights
