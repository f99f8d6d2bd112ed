"""Checkpoints of GPTQ, AWQ and compressed-tensors in codes, against `transformers`.

`transformers` gets the numbers that the codes stand for and computes in float32.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.errors import StartupError
from runtime.models.layers.experts import Experts
from runtime.models.registry import read_model_spec
from runtime.weights.live_weights import LiveWeights
from runtime.weights.load_model import load_model
from tests.numerics.test_fp8 import MIXTURE, agreement, context
from tests.numerics.test_gguf import divergence, prompt, reference, variant
from tests.support.driver import Driver, load
from tests.support.group_models import LAYOUTS, quantized, stored, write_codes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from kernels.experts.triton_coded import CodedExperts
# Several groups in each row, of heads' columns too.
WIDE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 64, "num_key_value_heads": 2,
        "num_attention_heads": 4}  # fmt: skip
# Mean divergence: a CPU rounds activations to 8 bits; these random models double any difference.
MOST = 0.01
# Where they are not rounded; least numbers of blocks are not, either.


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, tmp_path: Path) -> None:
    source = variant("llama", WIDE)
    values = write_codes(source, tmp_path / "m", LAYOUTS[name])
    tokens = prompt()
    expected = reference(source, values, tokens)
    driver = Driver(load(tmp_path / "m"))
    found = driver.prefill(driver.start(tokens))
    assert divergence(expected, found) < MOST
    assert agreement(expected, found) > 0.8
    for chunk in (1, 7):
        assert torch.equal(driver.prefill(driver.start(tokens), chunk), found)


@pytest.mark.parametrize("name", ["gptq_32", "awq", "packed_zeros"])
def test_experts(name: str, tmp_path: Path) -> None:
    source = variant("qwen2_moe", MIXTURE | {"moe_intermediate_size": 192,
                                             "shared_expert_intermediate_size": 192})  # fmt: skip
    values = write_codes(source, tmp_path / "m", LAYOUTS[name])
    tokens = prompt()
    driver = Driver(load(tmp_path / "m"))
    found = driver.prefill(driver.start(tokens))
    assert divergence(reference(source, values, tokens), found) < MOST


@pytest.mark.skipif(not INTERPRETED, reason="run by test_triton_interpreted")
@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("name", ["gptq_32", "packed_order"])
def test_experts_of_a_gpu(name: str, impl: str, tmp_path: Path) -> None:
    """Codes are multiplied where kernels have their form; they come back and are replaced."""
    source = variant("qwen2_moe", MIXTURE | {"moe_intermediate_size": 96, "num_experts": 4})
    values = write_codes(source, tmp_path / "m", LAYOUTS[name], ("attn", "shared", "gate.weight"))
    tokens = prompt()[:8]
    spec = read_model_spec(tmp_path / "m")
    settings = replace(context(), dtype=torch.bfloat16, experts=impl)
    model = load_model(tmp_path / "m", spec, settings, lambda share: None)
    holders = dict(model.holders())
    of_layers = [each for each in holders.values() if isinstance(each, Experts)]
    assert of_layers
    for each in of_layers:
        assert isinstance(each.packed, CodedExperts) == (name != "packed_order")
    driver = Driver(model)
    found = driver.prefill(driver.start(tokens))
    assert divergence(reference(source, values, tokens), found.float()) < MOST

    weights = LiveWeights(model, None, lambda: None, tmp_path / "spill")
    on_disk = load_file(tmp_path / "m" / "model.safetensors")
    for weight in spec.weights:
        holder, _, parameter = weight.target.rpartition(".")
        if holder.endswith(".experts"):
            part = holders[holder].part(parameter, weight.shard)
            assert torch.equal(part, on_disk[weight.name].to(part.dtype)), weight.name
    before = weights.digests()
    sent = next(name for name in values if name.endswith("experts.1.up_proj.weight"))
    weights.load_tensors({sent: values[sent].shape}, [(sent, 2 * values[sent])])
    step = 2 * values[sent].abs().max() / 15
    assert float((weights.read(sent, 100)[0] - 2 * values[sent][:100]).abs().max()) < 2 * step
    weights.undo()
    assert weights.digests() == before


def test_modules_in_16_bits_stay_so(tmp_path: Path) -> None:
    """A whole product, and one of three that are multiplied as one."""
    source = variant("llama", WIDE)
    values = write_codes(source, tmp_path / "m", LAYOUTS["packed"], ("layers.1.mlp", "v_proj"))
    tokens = prompt()
    driver = Driver(load(tmp_path / "m"))
    found = driver.prefill(driver.start(tokens))
    assert divergence(reference(source, values, tokens), found) < MOST
    weights = LiveWeights(driver.model, None, lambda: None, tmp_path / "spill")
    for weight in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.v_proj.weight"):
        assert torch.equal(weights.read(weight, 1000)[0], values[weight].float()), weight


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["gptq_zeros", "gptq_order", "awq", "packed", "packed_8_bits"])
def test_ranks_have_their_part_of_the_same_numbers(name: str, ranks: int, tmp_path: Path) -> None:
    """Halves of columns end inside of groups of 64; what was stored comes back bit for bit."""
    values = write_codes(variant("llama", WIDE), tmp_path / "m", LAYOUTS[name])
    on_disk = load_file(tmp_path / "m" / "model.safetensors")
    spec = read_model_spec(tmp_path / "m")
    for rank in range(ranks):
        model = load_model(tmp_path / "m", spec, context(rank, ranks), lambda share: None)
        holders = dict(model.holders())
        for weight in spec.weights_in_floats.values():
            holder, _, parameter = weight.target.rpartition(".")
            shard = dict(holders[holder].parameters())[parameter].shards[weight.shard]
            numbers = holders[holder].values(parameter, weight.shard)
            assert torch.allclose(numbers, shard.local_part(values[weight.name]), atol=1e-7)
        for weight in spec.weights if ranks == 1 else ():
            holder, _, parameter = weight.target.rpartition(".")
            part = holders[holder].part(parameter, weight.shard)
            assert torch.equal(part, on_disk[weight.name].to(part.dtype)), weight.name


def test_live_updates_take_codes_or_floats(tmp_path: Path) -> None:
    source, layout = variant("llama", WIDE), LAYOUTS["gptq_order"]
    values = write_codes(source, tmp_path / "m", layout)
    model = load(tmp_path / "m")
    weights = LiveWeights(model, None, lambda: None, tmp_path / "spill")
    name = "model.layers.0.self_attn.k_proj.weight"
    other = "model.layers.0.self_attn.q_proj.weight"
    before = weights.digests()

    # One in floats, under the name that a trainer has: its neighbours stay as they are.
    sent = (2 * values[name]).bfloat16()
    weights.load_tensors({name: sent.shape}, [(name, sent)])
    step = sent.float().abs().max() / 15
    assert float((weights.read(name, 1000)[0] - sent.float()).abs().max()) < step
    assert torch.allclose(weights.read(other, 1000)[0], values[other], atol=1e-7)
    weights.undo()
    assert weights.digests() == before

    # As the tool stores it.
    found = quantized(values[name] * 3, layout)
    stem = name.removesuffix("weight")
    tensors = {stem + key: each for key, each in stored(found, layout).items()}
    weights.load_tensors({k: list(v.shape) for k, v in tensors.items()}, tensors.items())
    assert torch.allclose(weights.read(name, 1000)[0], found.values(), atol=1e-7)
    weights.keep()

    # A folder in the same form, random numbers, released memory, and noise.
    weights.load_folder(tmp_path / "m")
    weights.keep()
    assert weights.digests() == before
    weights.release()
    weights.restore()
    assert weights.digests() == before
    weights.load_dummy(1)
    weights.undo()
    assert weights.digests() == before
    weights.destroy()
    weights.release()
    weights.restore()


_FP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_INT2 = {"num_bits": 2, "type": "int", "strategy": "channel"}


def _compressed(weights: dict, **more: object) -> dict:
    group = {"targets": ["re:.*mlp.*"], "weights": weights, **more}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": group}}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "3 bits of Linear"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "a group of 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
         "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128,
          "dynamic": {"+:.*down.*": {"bits": 8}}}, r"a scheme of their own of \+:\.\*down"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "'gemv'"),
        (_compressed(_FP4), r"float4 weights beside packed ones of re:\.\*mlp"),
        (_compressed(_INT2), r"2 bits of re:\.\*mlp"),
        (_compressed({**_INT2, "num_bits": 4}, input_activations={"num_bits": 8}),
         "a rounding of inputs"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128},
         "192 columns in groups of 128"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_one_line(words: dict, said: str, tmp_path: Path) -> None:
    write_codes(variant("llama", WIDE), tmp_path / "m", LAYOUTS["gptq_32"])
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": words}))
    with pytest.raises(StartupError, match=said) as caught:
        assert read_model_spec(tmp_path / "m").weights
    assert "\n" not in caught.value.message


def test_dummy_weights_and_no_files(tmp_path: Path) -> None:
    """What the words list as in 16 bits stays so where no header can tell."""
    source = variant("llama", WIDE)
    write_codes(source, tmp_path / "m", LAYOUTS["packed"])
    (tmp_path / "m" / "model.safetensors").unlink()
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*v_proj"]
    path.write_text(json.dumps(config))
    spec = read_model_spec(tmp_path / "m")
    names = {weight.name for weight in spec.weights}
    assert "model.layers.0.self_attn.v_proj.weight" in names
    assert "model.layers.0.self_attn.k_proj.weight_packed" in names
    assert "lm_head.weight" in names or spec.aliases
    model = load_model(tmp_path, spec, context(), lambda share: None, load_format="dummy")
    driver = Driver(model)
    assert bool(driver.prefill(driver.start(prompt())).isfinite().all())
    shutil.rmtree(tmp_path / "m")
