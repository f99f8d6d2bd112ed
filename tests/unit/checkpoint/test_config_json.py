from __future__ import annotations

import json

import pytest

from runtime.errors import StartupError
from runtime.models.registry import read_model_spec
from tests.support.fake_checkpoint import write_config

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def config_of(folder, **changes):
    return read_model_spec(write_config(folder, **changes))


def error_of(folder, **changes):
    with pytest.raises(StartupError) as caught:
        config_of(folder, **changes)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_shape_and_numbers(tmp_path):
    config = config_of(tmp_path)
    assert (config.architecture, config.model_type) == ("LlamaForCausalLM", "llama")
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 4)
    assert (config.rms_norm_eps, config.context_len, config.dtype) == (1e-5, 64, "bfloat16")
    assert config.rope.theta == 10000.0
    assert not config.tie_word_embeddings
    assert config.raw["vocab_size"] == 32


def test_overrides_replace_keys(tmp_path):
    folder = write_config(tmp_path)
    assert read_model_spec(folder, {"num_hidden_layers": 1}).num_layers == 1


def test_absent_key_value_heads_are_all_heads(tmp_path):
    assert config_of(tmp_path, num_key_value_heads=...).num_kv_heads == 4


def test_absent_numbers_have_the_familys_defaults(tmp_path):
    config = config_of(tmp_path, **QWEN3, rms_norm_eps=..., torch_dtype=...)
    assert (config.head_dim, config.rms_norm_eps, config.dtype) == (128, 1e-6, "float32")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (False, False, False, False)),
        ({"attention_bias": True}, (True, True, False, False)),
        ({"mlp_bias": True}, (False, False, True, False)),
        (QWEN2, (True, False, False, False)),
        # Qwen2 has no such key: a stray one changes nothing.
        ({**QWEN2, "attention_bias": False}, (True, False, False, False)),
        (QWEN3, (False, False, False, True)),
        ({**QWEN3, "attention_bias": True}, (True, True, False, True)),
        (MISTRAL, (False, False, False, False)),
    ],
)
def test_biases_and_head_norms(tmp_path, changes, expected):
    config = config_of(tmp_path, **changes)
    found = (config.attention_bias, config.output_bias, config.mlp_bias, config.qk_norm)
    assert found == expected


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, [None, None]),
        (MISTRAL, [4096, 4096]),
        ({**MISTRAL, "sliding_window": 8}, [8, 8]),
        ({**MISTRAL, "sliding_window": None}, [None, None]),
        ({**QWEN2, "sliding_window": 8}, [None, None]),
        ({**QWEN2, "sliding_window": 8, "use_sliding_window": True}, [None, None]),
        (
            {**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            [None, 8],
        ),
        (
            {
                **QWEN3,
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [8, None],
        ),
    ],
)
def test_sliding_windows(tmp_path, changes, windows):
    config = config_of(tmp_path, **changes)
    assert [config.attention(i).window for i in range(2)] == windows


@pytest.mark.parametrize(
    ("scaling", "kind", "context_len"),
    [
        ({"rope_type": "default"}, "default", 64),
        ({"rope_type": "linear", "factor": 2}, "linear", 128),
        ({"rope_type": "dynamic", "factor": 2}, "dynamic", 64),
        ({"rope_type": "llama3", **LLAMA3}, "llama3", 64),
        ({"rope_type": "yarn", "factor": 4.0}, "yarn", 256),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            "yarn",
            64,
        ),
    ],
)
def test_rope_is_the_same_in_both_styles(tmp_path, scaling, kind, context_len):
    old_keys = {("type" if key == "rope_type" else key): one for key, one in scaling.items()}
    older = config_of(tmp_path / "a", rope_theta=500.0, rope_scaling=old_keys)
    old = config_of(tmp_path / "b", rope_theta=500.0, rope_scaling=scaling)
    new = config_of(tmp_path / "c", rope_parameters={**scaling, "rope_theta": 500.0})
    assert older.rope == old.rope == new.rope
    assert (new.rope.scaling, new.rope.theta) == (kind, 500.0)
    assert older.context_len == new.context_len == context_len


def test_version_5_writes_dtype(tmp_path):
    assert config_of(tmp_path, torch_dtype=..., dtype="float16").dtype == "float16"


def test_end_of_text_ids_come_from_both_files(tmp_path):
    write_config(tmp_path, eos_token_id=3)
    assert read_model_spec(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3, 99]}))
    # 99 is beyond the vocabulary and can never be generated.
    assert read_model_spec(tmp_path).eos_token_ids == (5, 3)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True, "top_p": 0.9, "top_k": 0}, {"top_p": 0.9, "top_k": -1}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        (
            {"min_p": 0.1, "repetition_penalty": 1.05, "top_p": None},
            {"min_p": 0.1, "repetition_penalty": 1.05},
        ),
    ],
)
def test_sampling_defaults(tmp_path, generation, expected):
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_model_spec(tmp_path).generation_defaults == expected


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"hidden_size": 18}, "hidden_size"),
        ({"hidden_size": 1.5}, "hidden_size"),
        ({"head_dim": 5}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"max_position_embeddings": ...}, "max_position_embeddings"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"architectures": ...}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type"),
        ({"rope_scaling": {"type": "su"}}, "type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**QWEN2, "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_errors_name_the_key(tmp_path, changes, key):
    assert f"'{key}'" in error_of(tmp_path, **changes)


def test_unknown_architecture_names_the_nearest_and_all(tmp_path):
    message = error_of(tmp_path, architectures=["Qwen3ForCausalLm"])
    assert "Did you mean Qwen3ForCausalLM?" in message
    assert "LlamaForCausalLM" in message


def test_code_in_a_folder_is_never_run(tmp_path):
    auto_map = {"AutoModelForCausalLM": "modeling.Model"}
    message = error_of(tmp_path, architectures=["OwnModel"], auto_map=auto_map)
    assert "never run" in message
    # Where the architecture is known, ours runs and theirs is ignored.
    config_of(tmp_path, auto_map=auto_map)


def test_quantized_weights_are_refused(tmp_path):
    assert "'aqlm'" in error_of(tmp_path, quantization_config={"quant_method": "aqlm"})


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff", "[" * 100_000])
def test_broken_json_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(StartupError, match=r"config\.json"):
        read_model_spec(tmp_path)


def test_no_folder_and_no_config(tmp_path):
    with pytest.raises(StartupError, match="is not a folder"):
        read_model_spec(tmp_path / "absent")
    with pytest.raises(StartupError, match=r"no config\.json"):
        read_model_spec(tmp_path)
