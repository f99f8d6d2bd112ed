from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels.linear
from runtime.checkpoint.check import check_model_folder
from runtime.errors import StartupError
from runtime.models.layers.build_context import BuildContext, parse_dtype
from runtime.models.layers.linear import Linear
from runtime.models.registry import read_model_spec
from runtime.weights.fill import load_weights
from runtime.weights.load_model import (
    build_model,
    load_model,
    parameter_bytes,
)
from runtime.weights.read_tensors import checkpoint_tensors
from tests.support.fake_checkpoint import (
    LLAMA_JSON,
    expected_tensors,
    write_config,
    write_safetensors,
    write_shards,
)

CONTEXT = BuildContext(dtype=torch.float32, device=torch.device("cpu"))
TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 4}
CHANGES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama_tied": {"tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"]},
    # A tower's first product is stored as a convolution.
    "gemma3_vision": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 4,
        "image_token_index": 9,
        "text_config": {**LLAMA_JSON, "model_type": "gemma3_text"},
        "vision_config": {
            "num_hidden_layers": 2,
            "hidden_size": 12,
            "intermediate_size": 20,
            "num_attention_heads": 3,
            "image_size": 16,
            "patch_size": 4,
        },
    },
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "image_token_id": 9,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
        "vision_config": {**TOWER, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 9,
        "head_dim": 4,
        "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]},
        "vision_config": {
            **TOWER,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
}


def random_folder(folder, seed=0, dtype=torch.float32, **changes):
    """A model folder with random weights; returns the folder and its tensors."""
    write_config(folder, **changes)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in expected_tensors(folder).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors


def read_back(model) -> dict[str, torch.Tensor]:
    """The checkpoint tensors that a model holds, cut out of its packed weights."""
    holders = dict(model.holders())
    found = {}
    for spec in model.spec.weights:
        holder_name, _, parameter_name = spec.target.rpartition(".")
        holder = holders[holder_name]
        parameter = dict(holder.parameters())[parameter_name]
        if isinstance(holder, Linear) and parameter_name == "weight":
            assert parameter.tensor is None, "the plain copy must go once the weight is packed"
            tensor = holder.packed.unpack()
        else:
            tensor = parameter.tensor
        shard = parameter.shards[spec.shard]
        found[spec.name] = tensor.narrow(0, shard.offset, shard.num_rows).reshape(spec.shape)
    return found


def assert_holds(model, tensors):
    held = read_back(model)
    assert set(held) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(held[name], tensor.to(held[name].dtype)), name


def load(folder, context=CONTEXT, **options):
    return load_model(folder, read_model_spec(folder), context, lambda share: None, **options)


@pytest.mark.parametrize("name", list(CHANGES))
def test_every_tensor_arrives(tmp_path, name):
    folder, tensors = random_folder(tmp_path, **CHANGES[name])
    assert_holds(load(folder), tensors)


def test_shards(tmp_path):
    folder = write_config(tmp_path)
    write_shards(folder, expected_tensors(folder), 3)
    for path in sorted(folder.glob("*.safetensors")):
        save_file({k: torch.randn(v.shape) for k, v in load_file(path).items()}, path)
    tensors = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    assert_holds(load(folder), tensors)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_tensors_are_cast(tmp_path, stored, wanted):
    folder, tensors = random_folder(tmp_path, dtype=stored, attention_bias=True)
    context = dataclasses.replace(CONTEXT, dtype=parse_dtype(wanted))
    model = load(folder, context)
    assert_holds(model, tensors)
    assert {tensor.dtype for tensor in read_back(model).values()} == {parse_dtype(wanted)}


def test_progress_runs_from_nought_to_one(tmp_path):
    folder, _ = random_folder(tmp_path)
    shares = []
    load_model(folder, read_model_spec(folder), CONTEXT, shares.append)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert len(shares) > 10


def test_dummy_weights_need_no_files_and_follow_the_seed(tmp_path):
    folder = write_config(tmp_path, attention_bias=True)
    first, same, other = (
        read_back(load(folder, load_format="dummy", seed=seed)) for seed in (1, 1, 2)
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
    assert first["model.norm.weight"].eq(1).all()
    assert first["model.layers.0.self_attn.q_proj.bias"].eq(0).all()


def test_dummy_norms_change_nothing_where_weights_are_above_one_too(tmp_path):
    folder = write_config(tmp_path, **CHANGES["gemma3"])
    held = read_back(load(folder, load_format="dummy"))
    norms = [tensor for name, tensor in held.items() if "norm" in name]
    assert len(norms) == 2 * (4 + 2) + 1
    assert all(tensor.eq(0).all() for tensor in norms)


def test_a_folder_that_does_not_fit_is_refused_before_anything_is_read(tmp_path):
    folder, tensors = random_folder(tmp_path)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(StartupError, match=r"missing \(model\.norm\.weight\)"):
        load(folder)


def test_a_file_that_changes_after_the_check_is_one_line(tmp_path):
    folder, _ = random_folder(tmp_path)
    summary = check_model_folder(folder, read_model_spec(folder))
    (folder / "model.safetensors").write_bytes(b"no longer")
    with pytest.raises(StartupError, match="cannot be read"):
        list(checkpoint_tensors(summary, torch.device("cpu"), {}))


def test_parameter_bytes_counts_shared_matrices_once(tmp_path):
    folder = write_config(tmp_path, tie_word_embeddings=True)
    plain = dataclasses.replace(CONTEXT, linear="reference")
    sizes = [torch.Size(shape).numel() * 4 for shape in expected_tensors(folder).values()]
    model = load(folder, plain, load_format="dummy")
    assert parameter_bytes(model) == sum(sizes)
    embeddings = model.model.embed_tokens
    assert embeddings.head.unpack().data_ptr() == embeddings.weight.data_ptr()


# --- load_weights: the stream itself, and updates of a live model ---


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_live_model_takes_new_weights(tmp_path, name):
    folder, _ = random_folder(tmp_path, **CHANGES[name])
    model = load(folder)
    norm = model.model.norm.weight
    _, replacement = random_folder(tmp_path / "new", seed=1, **CHANGES[name])
    # Any order will do.
    load_weights(model, reversed(replacement.items()))
    assert_holds(model, replacement)
    if model.spec.tie_word_embeddings:
        head = model.model.embed_tokens.head.unpack()
        assert torch.equal(head, replacement["model.embed_tokens.weight"])
    assert norm.data_ptr() == model.model.norm.weight.data_ptr()


@pytest.mark.parametrize(
    "changed",
    [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.down_proj.bias",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ],
)
def test_a_partial_update_keeps_the_rest(tmp_path, changed):
    folder, tensors = random_folder(tmp_path, **CHANGES["llama"])
    model = load(folder)
    tensors[changed] = torch.randn_like(tensors[changed])
    load_weights(model, [(changed, tensors[changed])], partial=True)
    assert_holds(model, tensors)


def test_a_new_bias_is_used(tmp_path):
    folder, tensors = random_folder(tmp_path, **CHANGES["llama"])
    model = load(folder)
    name = "model.layers.0.self_attn.o_proj"
    bias = torch.randn_like(tensors[f"{name}.bias"])
    load_weights(model, [(f"{name}.bias", bias)], partial=True)
    x = torch.randn(3, 16)
    expected = x @ tensors[f"{name}.weight"].T + bias
    assert torch.allclose(model.model.layers[0].self_attn.o_proj.apply(x), expected, atol=1e-5)


def test_a_gated_product_follows_its_weights(tmp_path):
    folder, tensors = random_folder(tmp_path, **CHANGES["llama"])
    model = load(folder)
    layer = model.model.layers[0].mlp.gate_up_proj
    gated = layer.gated
    name = "model.layers.0.mlp.gate_proj"
    load_weights(model, [(f"{name}.weight", -tensors[f"{name}.weight"])], partial=True)
    x = torch.randn(3, 16)
    gate = -x @ tensors[f"{name}.weight"].T
    up = x @ tensors["model.layers.0.mlp.up_proj.weight"].T
    biases = [tensors.get(f"model.layers.0.mlp.{half}_proj.bias", 0) for half in ("gate", "up")]
    expected = torch.nn.functional.silu(gate + biases[0]) * (up + biases[1])
    for call in (gated, layer.gated):
        assert torch.allclose(call(x, "silu"), expected, atol=1e-5)
    layer.release()
    with pytest.raises(RuntimeError, match="released"):
        layer.gated(x, "silu")


def test_missing_unexpected_twice_and_wrong_shapes(tmp_path):
    folder, tensors = random_folder(tmp_path)
    config = read_model_spec(folder)
    norm, other = "model.norm.weight", "model.layers.9.mlp.up_proj.weight"
    streams = {
        "missing": [item for item in tensors.items() if item[0] != norm],
        "Unexpected tensor": [*tensors.items(), (other, torch.zeros(2, 2))],
        "comes twice": [*tensors.items(), (norm, tensors[norm])],
        r"is \[17\], expected \[16\]": [*tensors.items(), (norm, torch.zeros(17))],
        "expected a floating type": [(norm, torch.zeros(16, dtype=torch.int8))],
    }
    for message, stream in streams.items():
        with pytest.raises(StartupError, match=message):
            load_weights(build_model(config, CONTEXT), stream)


def test_a_failed_update_leaves_no_half_filled_layer(tmp_path):
    folder, tensors = random_folder(tmp_path)
    model = load(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(StartupError):
        load_weights(model, [(name, torch.zeros(16, 16)), ("what", torch.zeros(1))])
    assert_holds(model, tensors)


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    "implementation",
    [name for name in kernels.linear.LINEAR if kernels.linear.LINEAR.unavailable(name) is None],
)
def test_ranks_together_hold_and_compute_the_whole(tmp_path, tp_size, implementation):
    folder, tensors = random_folder(tmp_path, **CHANGES["llama"])
    ranks = [
        load(
            folder,
            dataclasses.replace(
                CONTEXT,
                tp_rank=rank,
                tp_size=tp_size,
                all_reduce=lambda part: part,
                linear=implementation,
            ),
        )
        for rank in range(tp_size)
    ]
    layers = [model.model.layers[0] for model in ranks]
    prefix = "model.layers.0.self_attn"
    x = torch.randn(5, 16)
    # Four query heads of four, two key heads that four ranks share in pairs.
    parts = [layer.self_attn.qkv_proj.apply(x) for layer in layers]
    assert [layer.self_attn.attention.num_heads for layer in layers] == [4 // tp_size] * tp_size
    assert [layer.self_attn.attention.num_kv_heads for layer in layers] == [1] * tp_size

    def rounded(each: torch.Tensor) -> torch.Tensor:
        return each.bfloat16().float() if implementation == "cpu_bf16" else each

    def product(inputs: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = (tensors[f"{prefix}.{name}_proj.{kind}"] for kind in ("weight", "bias"))
        return rounded(inputs) @ rounded(weight).T + bias

    whole = {shard: product(x, shard) for shard in "qkv"}
    rows = 16 // tp_size
    query = torch.cat([part[:, :rows] for part in parts], dim=1)
    assert torch.allclose(query, whole["q"], atol=1e-5)
    for rank, part in enumerate(parts):
        head = rank * 2 // tp_size
        key, value = part[:, rows : rows + 4], part[:, rows + 4 :]
        assert torch.allclose(key, whole["k"][:, head * 4 : head * 4 + 4], atol=1e-5)
        assert torch.allclose(value, whole["v"][:, head * 4 : head * 4 + 4], atol=1e-5)
    # Row-parallel parts add up, the bias once.
    inputs = whole["q"].chunk(tp_size, dim=1)
    summed = sum(
        layer.self_attn.o_proj.apply(part.contiguous())
        for layer, part in zip(layers, inputs, strict=True)
    )
    expected = product(whole["q"], "o")
    assert torch.allclose(summed, expected, atol=1e-4)


def test_ranks_that_cannot_divide_say_so(tmp_path):
    config = read_model_spec(write_config(tmp_path))
    for tp_size, message in ((3, "cannot be cut among 3"), (2, "needs context.all_reduce")):
        with pytest.raises(ValueError, match=message):
            build_model(config, dataclasses.replace(CONTEXT, tp_size=tp_size))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_loading_takes_the_model_and_one_layer(tmp_path, implementation):
    changes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    folder = write_config(tmp_path, **changes)
    write_safetensors(folder / "model.safetensors", expected_tensors(folder).items())
    command = [sys.executable, "-m", "tests.support.load_memory", str(folder)]
    # Matrices go back to the system when they are freed, whatever was allocated before.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    answer = subprocess.run(
        command + [implementation] * (implementation is not None),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    size, grown = map(int, answer.stdout.split())
    assert size > 100 * 2**20
    assert grown > 0.9 * size, "what was measured was not the loading"
    # The largest fused matrix, plain and packed, beside the model.
    fused = 2 * 2048 * 512 * 4
    assert grown < size + 2 * fused
