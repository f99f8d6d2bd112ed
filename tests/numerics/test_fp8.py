"""Checkpoints in E4M3 against `transformers` with the numbers that they stand for."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kernels.fp8_linear import Blocks, encode
from runtime.errors import StartupError
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.experts import Experts
from runtime.models.quantization.fp8.front import Fp8Quantization
from runtime.models.quantization.fp8.parameters import NUM_SCALES
from runtime.models.quantization.module_lists import Modules
from runtime.models.registry import read_model_spec
from runtime.weights.live_weights import LiveWeights
from runtime.weights.load_model import load_model
from tests.numerics.test_gguf import divergence, prompt, reference, variant
from tests.support.driver import Driver, load
from tests.support.fp8_models import LAYOUTS, Layout, is_linear, round_as, to_codes, write_fp8
from tests.support.gguf_models import write_gguf

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from kernels.experts.triton_eight_bits import EightBitExperts
# Rows and columns of several blocks, the last ones short.
WIDE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48, "num_key_value_heads": 2}
# Mean divergence from numbers that are not rounded; these random models double any difference.
MOST = {"none": 1e-6, "token": 0.08, "group": 0.08, "static": 0.08}
MIXTURE = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "moe_intermediate_size": 160,
    "shared_expert_intermediate_size": 160,
}


def rounded_reference(
    folder: Path,
    weights: dict[str, Tensor],
    layout: Layout,
    tokens: list[int],
    is_rounded: Callable[[str], bool] = lambda name: is_linear(name, (1, 1)),
) -> Tensor:
    """What `transformers` makes of it with the activations of these products rounded, too."""
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as other:
        shutil.copy(folder / "config.json", other)
        save_file({k: v.contiguous() for k, v in weights.items()}, f"{other}/model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_rounded(f"{name}.weight"):
            module.register_forward_pre_hook(
                lambda _, args, name=name: (round_as(layout, name, args[0]),)
            )
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def agreement(one: Tensor, other: Tensor) -> float:
    return float((one.argmax(-1) == other.argmax(-1)).float().mean())


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, tmp_path: Path) -> None:
    source, layout = variant("llama", WIDE), LAYOUTS[name]
    values = write_fp8(source, tmp_path / "m", layout)
    tokens = prompt()
    driver = Driver(load(tmp_path / "m"))
    found = driver.prefill(driver.start(tokens))
    plain = reference(source, values, tokens)
    exact = rounded_reference(source, values, layout, tokens)
    # A sum in another order may take an activation over the middle between two codes.
    assert divergence(exact, found) < (0.003 if layout.activations == "group" else 1e-6)
    assert divergence(plain, found) < MOST[layout.activations]
    assert agreement(plain, found) > 0.7
    for chunk in (1, 7):
        assert torch.equal(driver.prefill(driver.start(tokens), chunk), found)


@pytest.mark.parametrize(
    "name", ["compressed_weights_only", "compressed_tensor_static", "block", "int8_channel_dynamic"]
)
def test_experts(name: str, tmp_path: Path) -> None:
    source = variant("qwen2_moe", MIXTURE)
    values = write_fp8(source, tmp_path / "m", LAYOUTS[name])
    tokens = prompt()
    driver = Driver(load(tmp_path / "m"))
    found = driver.prefill(driver.start(tokens))
    expected = reference(source, values, tokens)
    assert divergence(expected, found) < MOST[LAYOUTS[name].activations]


@pytest.mark.skipif(not INTERPRETED, reason="run by test_triton_interpreted")
@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("name", ["compressed_weights_only", "block", "int8_tensor_static"])
def test_experts_of_a_gpu(name: str, impl: str, tmp_path: Path) -> None:
    """Experts are multiplied as codes; the codes come back and are replaced."""
    source = variant("qwen2_moe", MIXTURE | {"num_experts": 4})
    layout = LAYOUTS[name]
    values = write_fp8(source, tmp_path / "m", layout, kept=("attn", "shared", "gate.weight"))
    tokens = prompt()[:8]
    spec = read_model_spec(tmp_path / "m")
    settings = replace(context(), dtype=torch.bfloat16, experts=impl)
    model = load_model(tmp_path / "m", spec, settings, lambda share: None)
    holders = dict(model.holders())
    of_layers = [each for each in holders.values() if isinstance(each, Experts)]
    assert of_layers
    assert all(isinstance(each.packed, EightBitExperts) for each in of_layers)
    driver = Driver(model)
    found = driver.prefill(driver.start(tokens)).float()
    assert divergence(reference(source, values, tokens), found) < MOST[layout.activations] + 0.01

    weights = LiveWeights(model, None, lambda: None, tmp_path / "spill")
    on_disk = load_file(tmp_path / "m" / "model.safetensors")
    for weight in spec.weights:
        holder, _, parameter = weight.target.rpartition(".")
        if holder.endswith(".experts") and parameter in ("gate_up", "down"):
            part = holders[holder].part(parameter, weight.shard)
            assert torch.equal(part.float(), on_disk[weight.name].float()), weight.name
    before = weights.digests()
    sent = next(name for name in values if name.endswith("experts.1.up_proj.weight"))
    weights.load_tensors({sent: values[sent].shape}, [(sent, 2 * values[sent])])
    largest = float(values[sent].abs().max())
    assert float((weights.read(sent, 100)[0] - 2 * values[sent][:100]).abs().max()) < largest / 8
    weights.undo()
    assert weights.digests() == before


@pytest.mark.parametrize(
    "name", ["compressed_weights_only", "compressed_channel_dynamic", "int8_tensor_static"]
)
def test_modules_in_16_bits_stay_so(name: str, tmp_path: Path) -> None:
    """A whole product, and one of three that are multiplied as one."""
    source, layout = variant("llama", WIDE), LAYOUTS[name]
    values = write_fp8(source, tmp_path / "m", layout, kept=("layers.1.mlp", "v_proj"))
    tokens = prompt()
    driver = Driver(load(tmp_path / "m"))
    found = driver.prefill(driver.start(tokens))
    assert divergence(reference(source, values, tokens), found) < MOST[layout.activations]
    weights = LiveWeights(driver.model, None, lambda: None, tmp_path / "spill")
    for weight in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.v_proj.weight"):
        assert torch.equal(weights.read(weight, 1000)[0], values[weight].float()), weight


def context(rank: int = 0, ranks: int = 1) -> BuildContext:
    return BuildContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        tp_rank=rank,
        tp_size=ranks,
        all_reduce=lambda x: x,
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "name",
    ["compressed_tensor_static", "compressed_channel_dynamic", "block", "int8_channel_dynamic"],
)
def test_ranks_have_their_part_of_the_same_numbers(name: str, ranks: int, tmp_path: Path) -> None:
    """Halves of rows and columns end inside of blocks; what was stored comes back bit for bit."""
    values = write_fp8(variant("llama", WIDE), tmp_path / "m", LAYOUTS[name])
    stored = load_file(tmp_path / "m" / "model.safetensors")
    spec = read_model_spec(tmp_path / "m")
    for rank in range(ranks):
        model = load_model(tmp_path / "m", spec, context(rank, ranks), lambda share: None)
        holders = dict(model.holders())
        for weight in spec.weights:
            holder, _, parameter = weight.target.rpartition(".")
            shard = dict(holders[holder].parameters())[parameter].shards[weight.shard]
            part = holders[holder].part(parameter, weight.shard)
            expected = shard.local_part(stored[weight.name].reshape(weight.shape))
            assert torch.equal(part.float(), expected.float()), weight.name
            if weight.kind != "scale":
                numbers = holders[holder].values(parameter, weight.shard)
                assert torch.equal(numbers, shard.local_part(values[weight.name])), weight.name


def test_the_lowest_integer_comes_back(tmp_path: Path) -> None:
    folder, name = tmp_path / "m", "model.layers.0.self_attn.k_proj.weight"
    write_fp8(variant("llama", WIDE), folder, LAYOUTS["int8_channel_dynamic"])
    stored = load_file(folder / "model.safetensors")
    stored[name][3, 5:8] = torch.tensor([-128, -127, 127], dtype=torch.int8)
    save_file(stored, folder / "model.safetensors")
    holders = dict(load(folder).holders())
    part = holders["model.layers.0.self_attn.qkv_proj"].part("weight", "k")
    assert torch.equal(part, stored[name])


@pytest.mark.parametrize("tool", ["compressed-tensors", "modelopt"])
def test_scales_of_keys_and_values(tool: str, tmp_path: Path) -> None:
    """Keys and values beyond the range of E4M3 are kept as precisely as small ones."""
    source, folder = variant("llama", WIDE), tmp_path / "m"
    name = "modelopt" if tool == "modelopt" else "compressed_weights_only"
    layout = copy.deepcopy(LAYOUTS[name])
    if tool == "modelopt":
        layout.words["quantization"]["kv_cache_quant_algo"] = "FP8"
    else:
        layout.words["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    factors = {"q_proj": 1e-3, "k_proj": 1e3, "v_proj": 1e3, "o_proj": 1e-3}
    shutil.copytree(source, tmp_path / "large")
    path = tmp_path / "large" / "model.safetensors"
    tensors = load_file(path)
    large = {
        key: each * next((factor for part, factor in factors.items() if part in key), 1.0)
        for key, each in tensors.items()
    }
    save_file(large, path)
    write_fp8(tmp_path / "large", folder, layout, kept=("self_attn",))
    stored = load_file(folder / "model.safetensors")
    plain = Driver(load(folder)).model.spec
    assert not plain.quantization.kv_scales("model.layers.0.self_attn")
    tokens = prompt()

    def logits(form: str) -> Tensor:
        settings = replace(context(), kv_cache_dtype=form)
        spec = read_model_spec(folder)
        assert spec.quantization.kv_cache_dtype == "fp8_e4m3"
        driver = Driver(load_model(folder, spec, settings, lambda share: None), kv_form=form)
        return driver.prefill(driver.start(tokens), 7)

    exact, clipped = logits("auto"), logits("fp8_e4m3")
    scales = {
        f"model.layers.{i}.self_attn.{'' if tool != 'modelopt' else f'{which}_proj.'}{which}_scale":
        torch.tensor([20.0] if tool != "modelopt" else 20.0)
        for i in range(plain.num_layers) for which in ("k", "v")
    }  # fmt: skip
    save_file(stored | scales, folder / "model.safetensors")
    assert divergence(exact, logits("auto")) < 1e-6
    scaled = divergence(exact, logits("fp8_e4m3"))
    assert scaled < 0.1
    assert divergence(exact, clipped) > 3 * scaled


# Families with other layers than Llama's.
WHILE_LOADING: dict[str, dict[str, object]] = {
    "llama": WIDE,
    "gemma4_inputs": {},
    "ministral3": {},
    "phi3": {},
    "starcoder2_tied": {},
}


@pytest.mark.parametrize("name", WHILE_LOADING)
def test_floats_become_codes_while_they_load(name: str, tmp_path: Path) -> None:
    source = variant(name, WHILE_LOADING[name])
    spec = read_model_spec(source, {"quantization": "fp8"})
    assert isinstance(spec.quantization, Fp8Quantization)
    coded = {each.name for each in spec.logical_weights if spec.quantization.scheme(each)}
    values = dict(load_file(source / "model.safetensors"))
    for key in coded & values.keys():
        codes, scales = encode(values[key], Blocks(1, 0), num_scales=NUM_SCALES)
        values[key] = codes.float() * scales
    assert {key for key in values if is_linear(key, tuple(values[key].shape))} <= coded
    # An activation between two codes may become either; Gemma 4 has one in the tokens before.
    tokens = prompt()[8:]
    driver = Driver(load_model(source, spec, context(), lambda share: None))
    found = driver.prefill(driver.start(tokens))
    layout = LAYOUTS["compressed_channel_dynamic"]
    exact = rounded_reference(source, values, layout, tokens, coded.__contains__)
    assert divergence(exact, found) < 2e-5


@pytest.mark.parametrize("form", ["compressed_tensor_static", "int8_tensor_static"])
def test_live_updates_take_codes_or_floats(form: str, tmp_path: Path) -> None:
    source, layout = variant("llama", WIDE), LAYOUTS[form]
    values = write_fp8(source, tmp_path / "m", layout)
    model = load(tmp_path / "m")
    weights = LiveWeights(model, None, lambda: None, tmp_path / "spill")
    name = "model.layers.0.self_attn.k_proj.weight"
    other = "model.layers.0.self_attn.q_proj.weight"
    before = weights.digests()

    # One in floats: it gets codes and a scale of its own, and its neighbours keep theirs.
    sent = (2 * values[name]).bfloat16()
    weights.load_tensors({name: sent.shape}, [(name, sent)])
    expected = to_codes(sent.float(), (0, 0), layout.codes)[2]
    assert torch.allclose(weights.read(name, 1000)[0], expected, rtol=1e-6)
    assert torch.equal(weights.read(other, 1000)[0], values[other])
    weights.undo()
    assert weights.digests() == before

    # Codes and scales.
    codes, scale, expected = to_codes(values[name] * 3, (0, 0), layout.codes)
    tensors = {name: codes, name + "_scale": scale.view(())}
    weights.load_tensors({k: list(v.shape) for k, v in tensors.items()}, tensors.items())
    assert torch.equal(weights.read(name, 1000)[0], expected)
    weights.keep()

    # A folder in 16 bits, random numbers, released memory, and noise.
    weights.load_folder(source)
    weights.keep()
    weights.release()
    weights.restore()
    after = weights.digests()
    weights.load_dummy(1)
    weights.undo()
    assert weights.digests() == after
    weights.destroy()
    weights.release()
    weights.restore()


_NO = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2' of Linear"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"a block of \[128\]"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme 'none'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
        (
            {"quant_method": "compressed-tensors",
             "config_groups": {"group_0": {"targets": ["re:.*mlp.*"], "weights": _NO}}},
            r"int8 weights \(strategy 'channel', with zeros\) of re:\.\*mlp",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:("]}, "modules_to_not_convert"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' are not supported"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_one_line(words: dict, said: str, tmp_path: Path) -> None:
    shutil.copytree(variant("llama", WIDE), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": words}))
    with pytest.raises(StartupError, match=said) as caught:
        read_model_spec(tmp_path / "m")
    assert "\n" not in caught.value.message


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    write_gguf(variant("llama", WIDE), tmp_path / "model.gguf")
    with pytest.raises(StartupError, match="'gguf' already"):
        read_model_spec(tmp_path / "model.gguf", {"quantization": "fp8"})
    write_fp8(variant("llama", WIDE), tmp_path / "m", LAYOUTS["block"])
    same = read_model_spec(tmp_path / "m").quantization
    assert read_model_spec(tmp_path / "m", {"quantization": "fp8"}).quantization == same


@pytest.mark.parametrize(
    ("listed", "module", "is_in"),
    [
        ("lm_head", "lm_head", True),
        ("gate", "model.layers.0.mlp.gate", True),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", True),
        ("*.mlp.gate*", "model.layers.0.mlp.gate_proj", True),
        ("*.mlp", "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_lists_of_modules(listed: str, module: str, is_in: bool) -> None:
    assert (module in Modules((listed,))) is is_in
