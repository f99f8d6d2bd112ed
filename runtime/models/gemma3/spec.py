"""The `config.json` of Gemma 3's text models. Imports no torch.

Most layers have a window and a rotary embedding of their own. A layer has four norms.
"""

from __future__ import annotations

import json
from dataclasses import replace

from runtime.checkpoint.config_keys import MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.rope_json import MAX_POSITIONS, read_rope
from runtime.checkpoint.sentence_transformers import Pooling
from runtime.models.decoder.spec import (
    DecoderSpec,
    DecoderTraits,
    decoder_fields,
    read_window_pattern,
)

TRAITS = DecoderTraits(
    biases="keyed", qk_norm=True, head_dim=256, window="always", default_window=4096
)
NORMS = {
    "input_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
# Defaults of `transformers` for absent keys. `TRAITS` and the readers below hold further defaults.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
}
# The only supported values of keys that change results; `None` for a key that must be absent.
_ONLY = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def read_texts(config: Keys, generation: Keys) -> DecoderSpec:
    """Read EmbeddingGemma's `config.json`.

    The model has no language-model head, and its tokens may attend in both directions.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    values = {**config.values, "use_bidirectional_attention": None}
    spec = read(Keys(config.source, values), generation)
    spec = replace(spec, gives="vectors", pooling=Pooling("mean"))
    if not config.flag("use_bidirectional_attention", False):
        return spec
    window = spec.sliding_window
    # The file's window counts both sides together; ours counts one side and the token itself.
    window = None if window is None else window // 2 + 1
    return replace(spec, is_causal=False, sliding_window=window, raw=config.values)


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Read the family's `config.json`, as `transformers` 4 or 5 writes it.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "false for a model that generates text")
    for key, only in _ONLY.items():
        if config.values.get(key) not in (None, only):
            raise config.error(key, json.dumps(only))
    fields = decoder_fields(config, generation, TRAITS)
    windowed_layers = read_window_pattern(config, fields["num_layers"], 6)
    if windowed_layers and fields["sliding_window"] is None:
        raise config.error("sliding_window", "the number of keys that a query attends to")
    parameters = config.mapping("rope_parameters")
    if parameters and not all(isinstance(parameters.get(of), dict) for of in (_FULL, _WINDOWED)):
        raise config.error("rope_parameters", f"an object for {_FULL} and one for {_WINDOWED}")
    rope, _ = read_rope(config, layer_type=_FULL, theta=1e6)
    # `rope_scaling` of transformers 4 applies to the global rotation only.
    local = Keys(config.source, {**config.values, "rope_scaling": None})
    local_rope, _ = read_rope(
        local, layer_type=_WINDOWED, theta_key="rope_local_base_freq", theta=1e4
    )
    scalar = config.number("query_pre_attn_scalar", 1.0, float(MAX_WIDTH), 256.0)
    fields["windowed_layers"] = windowed_layers
    return DecoderSpec(
        **fields,
        rope=rope,
        windowed_rope=local_rope,
        # This already includes the scaling of the global rotation.
        context_len=config.integer("max_position_embeddings", MAX_POSITIONS),
        zero_centered_norms=True,
        norms=NORMS,
        activation="gelu_tanh",
        embedding_scale=fields["hidden_size"] ** 0.5,
        query_scale=scalar**-0.5,
    )
