"""`config.json` of Gemma 3 with its tower, read as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import StartupError
from runtime.models.gemma3_vision.spec import Gemma3VisionSpec
from runtime.models.registry import read_model_spec

BARE = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text"},
    "vision_config": {
        "model_type": "siglip_vision_model",
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
# As version 4 wrote the 4B model's.
VERSION_4: dict[str, Any] = {
    **BARE,
    "boi_token_index": 255_999,
    "eoi_token_index": 256_000,
    "eos_token_id": [1, 106],
    "image_token_index": 262_144,
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
FILES: dict[str, dict[str, Any]] = {
    "hardly anything": BARE,
    "version 4": VERSION_4,
    "version 5": {
        **BARE,
        "dtype": "bfloat16",
        "mm_tokens_per_image": 64,
        "image_token_index": 300,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "gemma3_text",
            "eos_token_id": 106,
            "vocab_size": 512,
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    },
}


def spec_of(folder: Path, values: dict[str, Any], **changes: Any) -> Gemma3VisionSpec:
    (folder / "config.json").write_text(json.dumps({**values, **changes}))
    spec = read_model_spec(folder)
    assert isinstance(spec, Gemma3VisionSpec)
    return spec


@pytest.mark.parametrize("style", FILES)
def test_read_as_transformers_reads_it(tmp_path: Path, style: str) -> None:
    from transformers import Gemma3Config

    spec = spec_of(tmp_path, FILES[style])
    theirs = Gemma3Config.from_pretrained(tmp_path)
    text, tower = theirs.text_config, theirs.vision_config
    pairs = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "bos_token_id": spec.bos_token_id,
    }
    assert pairs == {key: getattr(text, key) for key in pairs}
    vision = spec.vision
    pairs = {
        "hidden_size": vision.width,
        "intermediate_size": vision.intermediate_size,
        "num_hidden_layers": vision.depth,
        "num_attention_heads": vision.num_heads,
        "image_size": vision.side,
        "patch_size": vision.patch_size,
        "layer_norm_eps": vision.layer_norm_eps,
    }
    assert pairs == {key: getattr(tower, key) for key in pairs}
    assert spec.tie_word_embeddings == theirs.tie_word_embeddings
    assert vision.image_token_id == theirs.image_token_id
    assert vision.num_tokens == theirs.mm_tokens_per_image
    assert (vision.side // vision.patch_size // vision.merge_size) ** 2 == vision.num_tokens
    assert vision.is_bidirectional
    assert [spec.attention(i).window for i in range(spec.num_layers)] == [
        text.sliding_window if kind == "sliding_attention" else None for kind in text.layer_types
    ]


def test_what_the_whole_file_says_counts_for_the_text_model(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, VERSION_4)
    assert spec.dtype == "bfloat16"
    assert spec.eos_token_ids == (1, 106)
    assert spec.architecture == "Gemma3ForConditionalGeneration"
    assert spec.attention(5).rope.scaling == "linear"


def test_both_versions_names_are_known(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, VERSION_4)
    names = {weight.name for weight in spec.weights}
    block = "encoder.layers.3.self_attn.q_proj.bias"
    for of_text in ("language_model.model.", "model.language_model."):
        assert spec.canonical(f"{of_text}layers.2.mlp.up_proj.weight") in names
    for of_tower in ("vision_tower.vision_model.", "model.vision_tower.", "vision_tower."):
        assert spec.canonical(f"{of_tower}{block}") in names
    for of_projector in ("", "model."):
        name = f"{of_projector}multi_modal_projector.mm_input_projection_weight"
        assert spec.canonical(name) in names
    for spare in ("language_model.lm_head.weight", "vision_tower.vision_model.head.probe"):
        assert spec.is_ignored(spec.canonical(spare))
    assert not spec.is_ignored(spec.canonical("vision_tower.vision_model.encoder.x"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "'text_config' is missing; expected an object"),
        ({"vision_config": []}, "'vision_config' is []; expected an object"),
        ({"vision_config": {"hidden_size": 100}}, "'hidden_size' is 100; expected a multiple of"),
        ({"vision_config": {"hidden_act": "relu"}}, "'hidden_act' is 'relu'"),
        ({"vision_config": {"num_channels": 1}}, "'num_channels' is 1; expected 3"),
        ({"vision_config": {"image_size": 225}}, "'image_size' is 225; expected a multiple of"),
        ({"mm_tokens_per_image": 250}, "'mm_tokens_per_image' is 250; expected the square of"),
        ({"mm_tokens_per_image": 9}, "expected the square of a divisor of 64"),
        ({"image_token_index": 262_208}, "expected below 262208"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantiz"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        spec_of(tmp_path, VERSION_4, **changes)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 224, "width": 224}}, "'height' is 224; expected 896"),
        ({"do_pan_and_scan": True}, "'do_pan_and_scan' is True; expected false"),
    ],
)
def test_pictures_that_the_tower_cannot_take_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(changes))
    with pytest.raises(StartupError) as caught:
        spec_of(tmp_path, VERSION_4)
    assert message in caught.value.message
