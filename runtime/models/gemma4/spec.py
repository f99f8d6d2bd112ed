"""The settings of Gemma 4 for text, read from `config.json`. Imports no torch.

Layers without a window have other heads than windowed layers. The last layers may read the keys and
values of earlier layers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.checkpoint.attention_spec import AttentionSpec
from runtime.checkpoint.config_keys import MAX_HEAD_DIM, MAX_HEADS, MAX_VOCAB, MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import WeightSpec
from runtime.checkpoint.rope_json import MAX_POSITIONS, RopeConfig, read_rope
from runtime.models.decoder.experts_spec import (
    MAX_EXPERTS,
    MAX_EXPERTS_OF_MODEL,
    RouterSpec,
    StackedForm,
)
from runtime.models.decoder.spec import (
    DecoderSpec,
    DecoderTraits,
    decoder_fields,
    read_window_pattern,
)
from runtime.models.gemma3.spec import NORMS
from runtime.models.gemma4.gemma4_weights import Gemma4Experts, gemma4_weights
from runtime.models.vision.text_part import text_part

TRAITS = DecoderTraits(biases="keyed", qk_norm=True, head_dim=256, window="always")
# The defaults of `transformers` for absent keys.
DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
}
# The default of `rope_parameters`.
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
_WINDOWED, _FULL = "sliding_attention", "full_attention"
_PATTERN = 6
_MAX_CAP, _MAX_FACTOR = 1e6, 2.0**20
# Projections and norms of keys and values. Files also hold these for layers that read the keys of
# other layers.
_OF_KEYS = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")
# Name prefixes of the parts of a model that process images and sound.
_TOWERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")


@dataclass(frozen=True, kw_only=True)
class Gemma4Spec(DecoderSpec):
    """The settings of the decoder.

    Attributes:
        global_head_dim, num_global_kv_heads: head size and number of key/value heads in layers
            without a window.
        shares_values: whether layers without a window use their keys, before norm and rotation, as
            values.
        num_readers: number of layers at the end that keep no keys and values. They read those of
            the last earlier layer of the same kind.
        widens_readers: whether the MLP of these layers is twice as wide.
        input_size: elements of each layer's own embedding of a token; 0 if there are none.
        input_vocab_size: number of tokens in the table of these embeddings.
    """

    global_head_dim: int
    num_global_kv_heads: int
    shares_values: bool
    num_readers: int
    widens_readers: bool
    input_size: int
    input_vocab_size: int

    def canonical(self, name: str) -> str:
        """Return the name in `weights` of the checkpoint's tensor `name`.

        Models that take images name the text model's tensors with another prefix.
        """
        prefix = "model.language_model."
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
        return super().canonical(name)

    def is_ignored(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is not needed.

        Image and sound towers are not loaded. Neither are keys of layers that read other layers'
        keys.
        """
        found = _OF_KEYS.match(name)
        is_unread = found is not None and self.is_reader(int(found[1]))
        return is_unread or name.startswith(_TOWERS) or super().is_ignored(name)

    def _list_weights(self) -> Sequence[WeightSpec]:
        return gemma4_weights(self)

    def is_reader(self, layer_idx: int) -> bool:
        """Whether the layer reads the keys and values of an earlier layer."""
        return layer_idx >= self.num_layers - self.num_readers

    def is_global(self, layer_idx: int) -> bool:
        """Whether the layer's attention has no window."""
        return self.windowed_layers is not None and layer_idx not in self.windowed_layers

    def has_values(self, layer_idx: int) -> bool:
        """Whether a layer that keeps its own keys also has a projection for values."""
        return not (self.shares_values and self.is_global(layer_idx))

    def mlp_size(self, layer_idx: int) -> int:
        """Return the intermediate size of the layer's dense block."""
        return self.intermediate_size * (
            2 if self.widens_readers and self.is_reader(layer_idx) else 1
        )

    def attention(self, layer_idx: int) -> AttentionSpec:
        """Return the description of the attention of layer `layer_idx`."""
        layer = super().attention(layer_idx)
        if self.is_global(layer_idx):
            heads, size = self.num_global_kv_heads, self.global_head_dim
            layer = replace(layer, num_kv_heads=heads, head_dim=size)
        if not self.is_reader(layer_idx):
            return layer
        before = range(self.num_layers - self.num_readers)
        kind = self.is_global(layer_idx)
        return replace(layer, keys_of=max(i for i in before if self.is_global(i) == kind))

    @property
    def applies_kv_scales(self) -> bool:
        """Whether the checkpoint's scales of keys and values are applied.

        They are not, because values are normed.
        """
        return False

    @property
    def num_active_parameters(self) -> int:
        """Number of weight elements that one token reads.

        Of the table of the layers' embeddings, a token reads only one row.
        """
        return super().num_active_parameters - (
            self.input_vocab_size * self.num_layers * self.input_size
        )


def read(config: Keys, generation: Keys) -> Gemma4Spec:
    """Read the family's `config.json`.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    if config.values.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise config.error("hidden_activation", json.dumps("gelu_pytorch_tanh"))
    # The value "vision" only changes prompts with images.
    if config.values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise config.error("use_bidirectional_attention", "null or 'vision'")
    fields = decoder_fields(config, generation, TRAITS)
    num_layers = fields["num_layers"]
    windowed = read_window_pattern(config, num_layers, _PATTERN)
    # As in `transformers`, the last layer never has a window, whatever the file says.
    fields["windowed_layers"] = windowed - {num_layers - 1}
    if fields["sliding_window"] is None:
        raise config.error("sliding_window", "the number of keys that a query attends to")
    readers = config.integer("num_kv_shared_layers", num_layers - 1, 0, low=0)
    own = range(num_layers - readers)
    if readers and len({i in fields["windowed_layers"] for i in own}) < len(
        {i in fields["windowed_layers"] for i in range(num_layers)}
    ):
        raise config.error(
            "num_kv_shared_layers", "smaller: some layer of each kind must keep keys"
        )
    ropes = config.mapping("rope_parameters") or _ROPES
    if not all(isinstance(ropes.get(kind), dict) for kind in (_FULL, _WINDOWED)):
        raise config.error("rope_parameters", f"an object for {_FULL} and one for {_WINDOWED}")
    config = Keys(config.source, {**config.values, "rope_parameters": ropes})
    global_dim, global_heads = _global_heads(config, fields)
    input_size = config.integer("hidden_size_per_layer_input", MAX_WIDTH, 256, low=0)
    input_vocab = config.integer("vocab_size_per_layer_input", MAX_VOCAB, 262_144)
    if input_size and input_vocab < fields["vocab_size"]:
        raise config.error("vocab_size_per_layer_input", f"the {fields['vocab_size']} tokens")
    cap = config.values.get("final_logit_softcapping")
    return Gemma4Spec(
        **fields,
        rope=_global_rope(config, global_dim),
        windowed_rope=read_rope(config, layer_type=_WINDOWED)[0],
        context_len=config.integer("max_position_embeddings", MAX_POSITIONS),
        norms=NORMS,
        activation="gelu_tanh",
        embedding_scale=fields["hidden_size"] ** 0.5,
        query_scale=1.0,
        logit_softcap=0.0
        if cap is None
        else config.number("final_logit_softcapping", 1e-3, _MAX_CAP),
        experts=_read_experts(config, num_layers),
        global_head_dim=global_dim,
        num_global_kv_heads=global_heads,
        shares_values=config.flag("attention_k_eq_v", False),
        num_readers=readers,
        widens_readers=config.flag("use_double_wide_mlp", False),
        input_size=input_size,
        input_vocab_size=input_vocab,
    )


def read_text_part(config: Keys, generation: Keys) -> Gemma4Spec:
    """Read the text model's settings of a model that also takes images and sound.

    Images and sound are not served.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    spec = read(text_part(config), generation)
    return replace(spec, raw=config.values)


def _global_heads(config: Keys, fields: dict[str, int]) -> tuple[int, int]:
    """Return the head size and the number of key/value heads of layers without a window."""
    given = config.mapping("per_layer_config")
    if not given:
        heads = fields["num_kv_heads"]
        if config.flag("attention_k_eq_v", False):
            heads = config.integer("num_global_key_value_heads", MAX_HEADS, heads)
        return _even(config, "global_head_dim", 512), _divisor(config, fields, heads)
    # `transformers` writes the values that differ by layer here, and omits the keys above.
    windowed = fields["windowed_layers"]
    assert isinstance(windowed, frozenset)
    layers = [str(i) for i in range(fields["num_layers"]) if i not in windowed]
    first = given.get(layers[0])
    known = {"head_dim", "num_key_value_heads"}
    if (
        not isinstance(first, dict)
        or not set(first) <= known
        or given != dict.fromkeys(layers, first)
    ):
        raise config.error("per_layer_config", f"the same heads for every layer of {_FULL}")
    keys = Keys(f"{config.source}: per_layer_config", first)
    heads = keys.integer("num_key_value_heads", MAX_HEADS, fields["num_kv_heads"])
    return _even(keys, "head_dim", fields["head_dim"]), _divisor(keys, fields, heads)


def _even(keys: Keys, key: str, default: int) -> int:
    size = keys.integer(key, MAX_HEAD_DIM, default, low=2)
    if size % 2:
        raise keys.error(key, "an even number, for two halves of a head")
    return size


def _divisor(keys: Keys, fields: dict[str, int], heads: int) -> int:
    if fields["num_heads"] % heads:
        key = "num_key_value_heads"
        key = key if key in keys.values else "num_global_key_value_heads"
        raise keys.error(key, f"a divisor of {fields['num_heads']} attention heads")
    return heads


def _global_rope(config: Keys, head_dim: int) -> RopeConfig:
    """Return the rotary settings of layers without a window, where part of a head may rotate."""
    rope = Keys(f"{config.source}: rope_parameters", config.mapping("rope_parameters")[_FULL])
    if rope.values.get("rope_type") != "proportional":
        return read_rope(config, layer_type=_FULL)[0]
    share = rope.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    factor = rope.number("factor", 1e-6, _MAX_FACTOR, 1.0)
    num_angles = int(share * head_dim // 2)
    # The other angles have frequency 0, so that the kernels can treat the head as a whole.
    factors = [factor] * num_angles + [math.inf] * (head_dim // 2 - num_angles)
    theta = rope.number("rope_theta", 1.0, 1e12, 1e6)
    return RopeConfig(theta=theta, scaling="factors", parameters={"factors": factors})


def _read_experts(config: Keys, num_layers: int) -> Gemma4Experts | None:
    if not config.flag("enable_moe_block", False):
        return None
    num_experts = config.integer("num_experts", MAX_EXPERTS)
    if num_layers * num_experts > MAX_EXPERTS_OF_MODEL:
        limit = f"at most {MAX_EXPERTS_OF_MODEL} experts in all layers together"
        raise config.error("num_experts", limit)
    is_gguf = config.mapping("quantization_config").get("quant_method") == "gguf"
    return Gemma4Experts(
        num_experts=num_experts,
        num_chosen=config.integer("top_k_experts", num_experts),
        intermediate_size=config.integer("moe_intermediate_size", MAX_WIDTH),
        layers=frozenset(range(num_layers)),
        router=RouterSpec(sums_to_one=True),
        # In GGUF files each expert's rows of gate and of up are apart.
        stacked=None if is_gguf else StackedForm(),
    )
