"""Weights that get another form while they load, against `transformers` with the same numbers."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.errors import StartupError
from runtime.models.model import CausalLM
from runtime.models.quantization.registry import SAME, as_override
from runtime.models.registry import read_model_spec
from tests.support.driver import Driver, load
from tests.support.gguf_models import write_gguf
from tests.support.stored_numerics import WIDE, divergence, prompt, reference, variant

MOE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
# Tied and untied heads, biases, experts, and rows that are not a whole number of blocks of 256.
MODELS = {
    "llama": WIDE,
    "qwen2": WIDE,
    "qwen3": {**WIDE, "tie_word_embeddings": True},
    "qwen2_moe": MOE,
    "gemma3": {"query_pre_attn_scalar": 32},
    # Embeddings for each layer, layers that read the keys of others.
    "gemma4_inputs": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "ministral3": WIDE,
    # Every expert is chosen: with rounded activations tokens would choose others.
    "minimax_m2": {"hidden_size": 256, "intermediate_size": 256, "num_experts_per_tok": 6},
    # q, k and v in one matrix, also if they are cut among ranks.
    "phi3": {"hidden_size": 256, "intermediate_size": 256},
    "starcoder2_tied": {"hidden_size": 256, "intermediate_size": 256},
}


def files(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    return weights


def stands_for(model: CausalLM) -> dict[str, Tensor]:
    """The numbers of each weight, by the `gguf` package from the stored blocks."""
    holders = dict(model.holders())
    found = {}
    for weight in model.spec.logical_weights:
        holder, _, parameter = weight.target.rpartition(".")
        part = holders[holder].part(parameter, weight.shard)
        kind = model.spec.quantization.form(weight)
        if part.dtype is torch.uint8:
            numbers = gguf.dequantize(part.numpy(), gguf.GGMLQuantizationType[kind])
            part = torch.from_numpy(numbers.copy())
        found[weight.name] = part.float().reshape(weight.shape)
    return found


def logits(model: CausalLM, tokens: list[int]) -> Tensor:
    driver = Driver(model)
    return driver.prefill(driver.start(tokens))


@pytest.mark.parametrize("name", MODELS)
# Largest relative error of the matrices, and bytes against those of float32.
@pytest.mark.parametrize(("form", "error", "share"), [("q8_0", 0.01, 0.28), ("q4_k", 0.1, 0.2)])
def test_floats_become_blocks(name: str, form: str, error: float, share: float) -> None:
    folder = variant(name, MODELS[name])
    model = load(folder, overrides=as_override(form))
    numbers, stored = stands_for(model), files(folder)
    wide = [weight for weight in model.spec.logical_weights if weight.shape[-1] % 32 == 0]
    for weight in wide:
        off = (numbers[weight.name] - stored[weight.name].float()).norm()
        assert off <= error * stored[weight.name].float().norm(), weight.name
    tokens = prompt()
    expected, found = reference(folder, numbers, tokens), logits(model, tokens)
    # Rounded activations send a few tokens to other experts.
    assert divergence(expected, found) < (0.02 if "moe" in name else 0.005)
    # Quantized indeed: the original weights give something else.
    assert divergence(expected, logits(load(folder), tokens)) > 0
    if MODELS[name] is not MOE and WIDE.items() <= MODELS[name].items():
        held = sum(holder.size_bytes for _, holder in model.holders())
        assert held < share * 4 * model.spec.num_parameters
        assert 1 <= held / model.spec.weight_bytes(4, "cpu") < 1.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_16_bits_stay_16_bits_beside_float32(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = variant(name, MODELS[name])
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    stored = {name: each.to(dtype).contiguous() for name, each in files(folder).items()}
    save_file(stored, tmp_path / "model.safetensors")
    model, widened = load(tmp_path, overrides=as_override(SAME)), load(tmp_path)
    tokens = prompt()
    found = logits(model, tokens)
    expected = reference(folder, {name: each.float() for name, each in stored.items()}, tokens)
    scale = expected.abs().amax(dim=-1, keepdim=True)
    assert float(((found - expected).abs() / scale).max()) < 1e-4
    # No product is less exact than with a widened matrix.
    assert float((found - logits(widened, tokens)).abs().max()) < 1e-5 * float(scale.max())
    held, wide = (
        sum(holder.size_bytes for _, holder in each.holders()) for each in (model, widened)
    )
    assert held < 0.56 * wide
    for name, values in stands_for_16(model).items():
        assert torch.equal(values, stored[name]), name


def stands_for_16(model: CausalLM) -> dict[str, Tensor]:
    """What a reader of the weights of a server that runs would get."""
    holders = dict(model.holders())
    found = {}
    for weight in model.spec.logical_weights:
        kind = model.spec.quantization.form(weight)
        if kind == "F32":
            continue
        holder, _, parameter = weight.target.rpartition(".")
        values = holders[holder].values(parameter, weight.shard)
        dtype = torch.bfloat16 if kind == "BF16" else torch.float16
        found[weight.name] = values.to(dtype)
    return found


def test_what_is_quantized_already_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(variant("llama", WIDE), path)
    with pytest.raises(StartupError, match=r"--quantization q4_k: .* with 'gguf' already"):
        read_model_spec(path, as_override("q4_k"))
