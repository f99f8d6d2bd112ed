"""Qwen2.5-VL's, Qwen3-VL's and Qwen3.5's files in the styles of transformers 4 and 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint.vision_spec import VisionSpec
from runtime.errors import StartupError
from runtime.models.qwen2_5_vl.spec import Qwen2_5_VLSpec
from runtime.models.qwen3_5.spec import Qwen3_5VLSpec
from runtime.models.qwen3_vl.spec import Qwen3VLSpec
from runtime.models.registry import read_model_spec
from runtime.models.vision.qwen_config import QwenVLSpec

BARE = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
TOWER = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
    "num_heads": 16, "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14,
    "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
}  # fmt: skip
# As the 3B model's on the hub: the text model's keys beside the tower's.
VERSION_4: dict[str, Any] = {
    **BARE,
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 11008, "max_position_embeddings": 128000, "max_window_layers": 70,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936, "vision_config": TOWER,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
_OUTER = (*BARE, "image_token_id", "video_token_id", "vision_config", "tie_word_embeddings")
VERSION_5: dict[str, Any] = {
    **{key: VERSION_4[key] for key in _OUTER},
    "dtype": "bfloat16",
    "text_config": {
        **{key: VERSION_4[key] for key in VERSION_4 if key not in (*_OUTER, "rope_scaling")},
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24],
        },
    },
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "text_config": {
        "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
        "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
        "intermediate_size": 9728, "max_position_embeddings": 262144, "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
        },
        "rope_theta": 5000000, "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024, "in_channels": 3, "intermediate_size": 4096, "num_heads": 16,
        "num_position_embeddings": 2304, "out_hidden_size": 2560, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip

# As the 35B-A3B model's on the hub.
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "text_config": {
        "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 2048, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "shared_expert_intermediate_size": 512, "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
            "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        },
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152, "in_channels": 3, "intermediate_size": 4304, "num_heads": 16,
        "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


def spec_of(folder: Path, values: dict[str, Any], **changes: Any) -> QwenVLSpec:
    (folder / "config.json").write_text(json.dumps({**values, **changes}))
    spec = read_model_spec(folder)
    assert isinstance(spec, QwenVLSpec)
    return spec


FORMS = {
    "4": VERSION_4,
    "5": VERSION_5,
    "Qwen3": QWEN3,
    "Qwen3.5": {
        **QWEN3_5,
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {
            **QWEN3_5["text_config"],
            "model_type": "qwen3_5_text",
            "intermediate_size": 6144,
        },
    },
}


@pytest.mark.parametrize("values", FORMS.values(), ids=FORMS)
def test_read_as_transformers_reads_it(tmp_path: Path, values: dict[str, Any]) -> None:
    from transformers import AutoConfig

    spec = spec_of(tmp_path, values)
    whole = AutoConfig.from_pretrained(tmp_path)
    text, tower = whole.text_config, whole.vision_config
    assert {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.context_len,
        "eos_token_id": spec.eos_token_ids[0],
    }.items() <= vars(text).items()
    assert (spec.rope.theta, spec.rope.scaling) == (text.rope_parameters["rope_theta"], "default")
    assert spec.tie_word_embeddings == whole.tie_word_embeddings
    vision = spec.vision
    assert vision.image_token_id == whole.image_token_id
    assert (vision.depth, vision.width) == (tower.depth, tower.hidden_size)
    assert (vision.num_heads, vision.intermediate_size) == (
        tower.num_heads,
        tower.intermediate_size,
    )
    assert (vision.patch_size, vision.merge_size) == (tower.patch_size, tower.spatial_merge_size)
    assert (spec.dtype, spec.raw) == ("bfloat16", values)


def test_both_styles_say_the_same(tmp_path: Path) -> None:
    first, second = spec_of(tmp_path, VERSION_4), spec_of(tmp_path, VERSION_5)
    assert isinstance(first, Qwen2_5_VLSpec)
    assert first.vision == second.vision
    assert first.rope_axes == second.rope_axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert [each.name for each in first.weights] == [each.name for each in second.weights]
    assert (first.vision.window, first.vision.full_blocks) == (4, (7, 15, 23, 31))


def test_axes_take_turns_in_qwen3(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, QWEN3)
    assert isinstance(spec, Qwen3VLSpec)
    assert spec.rope_axes == (0, 1, 2) * 20 + (0,) * 4
    assert (spec.vision.num_outputs, spec.vision.deep_blocks) == (4, (5, 11, 17))
    assert spec.vision.grid_side == 48


def test_a_quarter_of_a_head_has_axes_in_qwen3_5(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, QWEN3_5)
    assert isinstance(spec, Qwen3_5VLSpec)
    assert (spec.rotary_dim, spec.rope.theta) == (64, 1e7)
    assert spec.rope_axes == (0, 1, 2) * 10 + (0, 1)
    assert (spec.vision.num_outputs, spec.vision.deep_blocks) == (1, ())
    assert [i for i in range(8) if spec.recurrence(i) is None] == [3, 7]
    assert spec.experts is not None
    assert spec.experts.router.sums_to_one
    # The model of 35 billion parameters, of which a token passes 3 billion.
    assert 34e9 < spec.num_parameters < 36e9
    assert 3e9 < spec.num_active_parameters < 4e9
    assert spec.is_ignored("mtp.layers.0.mlp.gate.weight")


def test_yarn_stretches_the_rotation_of_three_axes(tmp_path: Path) -> None:
    yarn = {
        "type": "yarn", "mrope_section": [16, 24, 24], "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }  # fmt: skip
    spec = spec_of(tmp_path, VERSION_4, rope_scaling=yarn)
    assert (spec.rope.scaling, spec.rope_axes[20]) == ("yarn", 1)


@pytest.mark.parametrize(
    "name",
    ["visual.blocks.0.norm1.weight", "model.visual.blocks.0.norm1.weight"],
)
def test_both_names_of_the_tower(tmp_path: Path, name: str) -> None:
    assert spec_of(tmp_path, VERSION_4).canonical(name) == "visual.blocks.0.norm1.weight"


def test_both_names_of_the_decoder(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, VERSION_5)
    for name in ("model.language_model.norm.weight", "model.norm.weight"):
        assert spec.canonical(name) == "model.norm.weight"
    assert spec.canonical("lm_head.weight") == "lm_head.weight"
    assert spec.is_ignored("lm_head.weight")


def with_processor(folder: Path, values: dict[str, Any], name: str = "preprocessor") -> VisionSpec:
    (folder / f"{name}_config.json").write_text(json.dumps(values))
    return spec_of(folder, VERSION_4).vision


@pytest.mark.parametrize(
    "values",
    [
        {"min_pixels": 784, "max_pixels": 50176},
        {"size": {"shortest_edge": 784, "longest_edge": 50176}},
        {"size": {"min_pixels": 784, "max_pixels": 50176}},
        {"size": {"shortest_edge": 9, "longest_edge": 9}, "min_pixels": 784, "max_pixels": 50176},
    ],
)
def test_bounds_of_pixels(tmp_path: Path, values: dict[str, Any]) -> None:
    vision = with_processor(tmp_path, values)
    assert (vision.min_pixels, vision.max_pixels, vision.max_tokens) == (784, 50176, 64)


def test_the_processors_numbers(tmp_path: Path) -> None:
    numbers = {"image_mean": [0.5, 0.4, 0.3], "image_std": 0.5, "resample": 2}
    for name, values in (("preprocessor", numbers), ("processor", {"image_processor": numbers})):
        vision = with_processor(tmp_path, values, name)
        assert (vision.mean, vision.std, vision.resample) == ((0.5, 0.4, 0.3), (0.5,) * 3, 2)
        assert (vision.min_pixels, vision.max_pixels) == (3136, 1003520)
        (tmp_path / f"{name}_config.json").unlink()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"do_resize": False}, "'do_resize' is False; expected true"),
        ({"do_normalize": False}, "'do_normalize' is False; expected true"),
        ({"patch_size": 16}, "'patch_size' is 16; expected 14"),
        ({"merge_size": 1}, "'merge_size' is 1; expected 2"),
        ({"image_mean": [0.5]}, "'image_mean' is [0.5]; expected 3 numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "not 0"),
        ({"max_pixels": 100}, "'max_pixels' is 100; expected at least"),
        ({"size": {"longest_edge": "x"}}, "longest_edge"),
        ({"resample": 9}, "resample"),
    ],
)
def test_a_processor_that_cannot_be_had_is_named(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError) as caught:
        with_processor(tmp_path, values)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vision_config": None}, "'vision_config' is missing"),
        ({"vision_config": {**TOWER, "hidden_act": "gelu"}}, "expected 'silu'"),
        ({"vision_config": {**TOWER, "out_hidden_size": 1}}, "expected the decoder's 2048"),
        ({"vision_config": {**TOWER, "in_chans": 1}}, "'in_chans' is 1; expected 3"),
        ({"vision_config": {**TOWER, "num_heads": 9}}, "a multiple of 4 for each of 9 heads"),
        ({"vision_config": {**TOWER, "window_size": 14}}, "at least 28"),
        ({"vision_config": {**TOWER, "fullatt_block_indexes": [32]}}, "blocks from 0 to 31"),
        ({"vision_config": {**TOWER, "fullatt_block_indexes": [3, 1]}}, "an ascending list"),
        ({"image_token_id": 151936}, "below 151936"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "that make 64"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 25]}}, "that make 64"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, True]}}, "that make 64"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantized with 'aqlm'"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        spec_of(tmp_path, {**VERSION_4, **values})
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_features_of_more_depths_than_layers_are_refused(tmp_path: Path) -> None:
    text = {**QWEN3["text_config"], "num_hidden_layers": 3}
    with pytest.raises(StartupError, match="fewer than the decoder's 3 layers"):
        spec_of(tmp_path, QWEN3, text_config=text)
