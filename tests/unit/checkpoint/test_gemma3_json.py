"""Gemma 3's `config.json` in the styles of transformers 4 and 5, read as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import StartupError
from runtime.models.decoder.spec import DecoderSpec
from runtime.models.registry import read_model_spec

BARE = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
LINEAR = {"rope_type": "linear", "factor": 8.0}
# As version 4 wrote the 1B model's, and with what larger ones have.
VERSION_4: dict[str, Any] = {
    **BARE,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 168,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
FILES: dict[str, dict[str, Any]] = {
    "nothing": BARE,
    "version 4": VERSION_4,
    "version 4, stretched": {**VERSION_4, "rope_scaling": LINEAR},
    "version 4, other numbers": {
        **VERSION_4,
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": False,
    },
    "version 5": {
        **BARE,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {**LINEAR, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    },
    "all layers alike": {**VERSION_4, "sliding_window_pattern": 1},
}


def spec_of(folder: Path, values: dict[str, Any], **changes: Any) -> DecoderSpec:
    (folder / "config.json").write_text(json.dumps({**values, **changes}))
    spec = read_model_spec(folder)
    assert isinstance(spec, DecoderSpec)
    return spec


@pytest.mark.parametrize("style", FILES)
def test_read_as_transformers_reads_it(tmp_path: Path, style: str) -> None:
    from transformers import Gemma3TextConfig

    spec = spec_of(tmp_path, FILES[style])
    theirs = Gemma3TextConfig.from_pretrained(tmp_path)
    pairs = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.context_len,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": spec.attention_bias,
        "bos_token_id": spec.bos_token_id,
    }
    assert pairs == {key: getattr(theirs, key) for key in pairs}
    ends = theirs.eos_token_id
    assert list(spec.eos_token_ids) == (ends if isinstance(ends, list) else [ends])
    assert spec.query_scale == theirs.query_pre_attn_scalar**-0.5
    assert spec.embedding_scale == theirs.hidden_size**0.5
    for i, kind in enumerate(theirs.layer_types):
        window = theirs.sliding_window if kind == "sliding_attention" else None
        assert spec.attention(i).window == window
        numbers, rope = theirs.rope_parameters[kind], spec.attention(i).rope
        assert (rope.theta, rope.scaling) == (numbers["rope_theta"], numbers["rope_type"])
        assert rope.parameters.get("factor") == numbers.get("factor")


def test_prefixes_are_shared_where_a_layer_sees_all_keys(tmp_path: Path) -> None:
    assert spec_of(tmp_path, VERSION_4).max_window is None
    # The first five layers have the window.
    assert spec_of(tmp_path, VERSION_4, num_hidden_layers=5).max_window == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0; expected null"),
        ({"final_logit_softcapping": 0}, "'final_logit_softcapping' is 0; expected null"),
        ({"use_bidirectional_attention": True}, "is True; expected false"),
        (
            {"hidden_activation": "silu"},
            "'hidden_activation' is 'silu'; expected \"gelu_pytorch_tanh",
        ),
        ({"sliding_window": None}, "'sliding_window' is missing"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"layer_types": ["chunked_attention"] * 26}, "layer_types"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "one for sliding_attention"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type"),
        ({"rope_local_base_freq": "x"}, "rope_local_base_freq"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        spec_of(tmp_path, VERSION_4, **changes)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
